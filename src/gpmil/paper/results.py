"""What the fitted models said of the test slides: everything that tables and figures need."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from gpmil.data.bags import Bags
from gpmil.paper.methods import Method


@dataclass(frozen=True)
class Run:
    """One method, fitted once: what it says of the test slides and patches, and what it cost."""

    log_odds: Float[np.ndarray, " B"]  # of a positive slide
    probability: Float[np.ndarray, " B"]
    patch_probability: Float[np.ndarray, " N"] | None  # None: the model says nothing of patches
    flagged: Bool[np.ndarray, " N"] | None  # marked at a false discovery rate; first run only
    fit_seconds: float
    predict_seconds: float
    notes: dict[str, Any] = field(default_factory=dict)  # settings that were learned, epochs


@dataclass(frozen=True)
class Results:
    """All runs on one cohort."""

    name: str  # of the cohort, in words: "simulated SICAPv2-like cohort"
    source: str  # what the data are and how they differ from the paper's, one or two sentences
    train: Bags
    test: Bags  # with labels, and instance labels where they are known (-1 elsewhere)
    methods: Sequence[Method]  # in the order of the tables
    runs: dict[str, list[Run]]  # by Method.key
    images: Path | None = None  # folder with one image a slide, where there are any

    def of(self, key: str) -> list[Run]:
        """The runs of one method; none where it was not run."""
        return self.runs.get(key, [])

    def method(self, key: str) -> Method:
        """The method of a key."""
        return next(m for m in self.methods if m.key == key)

    @property
    def knows_patches(self) -> bool:
        """Whether test patches of both classes have known labels."""
        return self.test.instance_labels is not None and {0, 1} <= set(self.test.instance_labels)
