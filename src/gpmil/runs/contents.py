"""What a run folder holds, with its model: opened for the page of the run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpmil.models import BagClassifier, load
from gpmil.runs.files import (
    CARD,
    METRICS,
    PATCHES,
    PREDICTIONS,
    coupling_folder,
    has_given_labels,
    patch_path,
    read_card,
    read_metrics,
    read_patches,
    read_predictions,
    repeat_folder,
    with_given_labels,
)
from gpmil.runs.naming import class_words

PatchLabels = Callable[[str, pd.DataFrame], np.ndarray]


@dataclass(frozen=True)
class RunContents:
    """What a run folder holds."""

    folder: Path
    config: dict[str, Any]
    slides: pd.DataFrame  # predictions.csv
    model: BagClassifier | None
    metrics: dict[str, Any]  # metrics.json
    patch_labels: PatchLabels | None = None  # in place of those of the tables
    given: bool = False  # labels are those of gpmil evaluate, not of the run itself
    patients_known: bool = False  # when it was run, whatever gpmil evaluate was told later

    @classmethod
    def read(
        cls,
        folder: Path,
        slides: pd.DataFrame | None = None,
        metrics: dict[str, Any] | None = None,
        patch_labels: PatchLabels | None = None,
        given: bool | None = None,
    ) -> "RunContents":
        """Open a finished run, or one about to be finished; what is given is not read."""
        config = read_card(folder / CARD)
        own = read_predictions(folder) if (folder / PREDICTIONS).exists() else pd.DataFrame()
        if slides is None:
            slides = with_given_labels(own, folder) if "slide" in own else own
        if metrics is None:
            metrics = read_metrics(folder / METRICS)
        if "repeat" in slides and slides["repeat"].nunique() < 2:
            slides = slides.drop(columns="repeat")
        model = load(folder / "model") if (folder / "model").is_dir() else None
        given = has_given_labels(folder) if given is None else given
        return cls(folder, config, slides, model, metrics, patch_labels, given, has_patients(own))

    @property
    def known(self) -> pd.DataFrame:
        """Slides whose label is known, and that are called."""
        if "label" not in self.slides:
            return self.slides.iloc[:0]
        return self.called[self.called["label"].isin([0, 1])]

    @property
    def couplings(self) -> list[str]:
        """The couplings, where there are several."""
        return list(self.slides["coupling"].unique()) if "coupling" in self.slides else []

    @property
    def words(self) -> tuple[str, str]:
        """What the negative and the positive class are called."""
        return class_words(self.config)

    @property
    def fitted_coupling(self) -> str | None:
        """That of the couplings which the model was fitted with, by its text; None: not there."""
        known = self.config.get("fitted_coupling", getattr(self.model, "coupling_", None))
        return next((c for c in self.couplings if known is not None and float(c) == known), None)

    @property
    def called(self) -> pd.DataFrame:
        """Rows that call slides: of several couplings those of the fit alone."""
        if not self.couplings:
            return self.slides
        return self.slides[self.slides["coupling"] == self.fitted_coupling]

    def judged(self) -> dict[str, Any]:
        """The metrics; of several couplings those of the fit."""
        if "couplings" not in self.metrics:
            return self.metrics
        return self.metrics["couplings"].get(self.fitted_coupling) or {}

    def patches(self, row: pd.Series, coupling: str | None = None) -> pd.DataFrame | None:
        """The patches of a slide, of the same coupling and repeat (or of the coupling given)."""
        under = ""
        if "coupling" in row:
            under = coupling_folder(coupling or row["coupling"])
        elif "repeat" in row and (self.folder / PATCHES / repeat_folder(row["repeat"])).is_dir():
            under = repeat_folder(row["repeat"])
        file = patch_path(self.folder, row["slide"], under)
        if not file.exists():
            return None
        table = read_patches(file)
        if self.patch_labels is not None:
            table["label"] = self.patch_labels(row["slide"], table)
        return table

    def side(self, what: str, slide: str) -> Any:
        """The distance of patches ("steps") or their side ("sizes"), where the run knows it."""
        return self.config.get(what, {}).get(slide)


def has_patients(slides: pd.DataFrame) -> bool:
    """Whether any row names a patient."""
    return "patient" in slides and bool((slides["patient"] != "").any())
