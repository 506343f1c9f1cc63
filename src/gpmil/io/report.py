"""What was read, for people: numbers, guesses and whatever looks alarming."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpmil.data.bags import Bags
from gpmil.data.checks import count, listed
from gpmil.data.classes import NEGATIVE, POSITIVE, Found, described, named, of_one_class
from gpmil.data.positions import MANY_INSTANCES

MANY_ISOLATED = 0.5
"""A larger share of patches without a neighbour is worth a warning."""


@dataclass(frozen=True)
class ReadReport:
    """What `gpmil.io.read_with_report` found, guessed and left out.

    `step` says the step and where it came from, `notes` every guess in one sentence,
    `classes` holds count and role of each class of labels, `positive` and `negative` are the names
    of those that count as 1 and 0 (several with commas between), None where there is none.
    `edges_per_patch` counts an edge once, `without_edges` names slides of many patches and no
    edge, `skipped` holds (name, reason), `cache` is the folder with the features. `n_patients` is
    None where no patient is known; `patients_doubted` says if names suggest that there are some.
    """

    format: str
    n_files: int
    n_slides: int
    n_patches: int
    n_features: int
    dtype: str
    encoder: str | None
    step: str
    units: str
    edges_per_patch: float
    isolated: int
    without_edges: tuple[str, ...]
    matched: int
    labels_without_slide: tuple[str, ...]
    slides_without_label: tuple[str, ...]
    duplicates: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    cache: str | None = None
    n_patients: int | None = None
    patients_doubted: str = ""
    patches: str = ""  # how they were cut, where files tell
    classes: Found = field(default_factory=dict)

    @property
    def positive(self) -> str | None:
        """The class that counts as 1."""
        return named(self.classes, POSITIVE)

    @property
    def negative(self) -> str | None:
        """The class that counts as 0."""
        return named(self.classes, NEGATIVE)

    def lines(self) -> list[str]:
        """The report, one fact per line."""
        return [
            f"format: {self.format}, {count(self.n_files, 'file')}",
            f"{count(self.n_slides, 'slide')}, {self.n_patches:,} patches x "
            f"{count(self.n_features, 'feature')}, {self.dtype}",
            f"encoder: {self.encoder or 'not said in the files'}",
            *([f"patches: {self.patches}"] if self.patches else []),
            f"positions: {self.units}; step: {self.step}",
            f"graph: {self.edges_per_patch:.3g} edges per patch, "
            f"{self.isolated:,} patches without a neighbour",
            f"labels: {count(self.matched, 'slide')} with a label, "
            f"{len(self.slides_without_label):,} without, "
            f"{count(len(self.labels_without_slide), 'label')} without a slide",
            f"patients: {NO_PATIENTS if self.n_patients is None else self.n_patients}",
            *([f"classes: {described(self.classes)}"] if self.classes else []),
            *([f"features are kept in {self.cache}"] if self.cache else []),
            *(f"left out: {name}: {reason}" for name, reason in self.skipped),
            *(f"note: {note}" for note in self.notes),
        ]

    def warnings(self) -> list[str]:
        """What is alarming; empty where nothing is."""
        return [
            *self._about_the_graph(),
            # Without a label there are neither folds nor intervals to worry about.
            *([self.patients_doubted] if self.patients_doubted and self.matched else []),
            *filter(None, [of_one_class(self.classes)]),
            *(f"{count(len(names), noun)} {what}: {listed(names)}." for names, noun, what in (
                (self.slides_without_label if self.matched else (), "slide", "without a label"),
                (self.labels_without_slide, "label", "without a slide"),
                (self.duplicates, "slide", "listed more than once in the labels"),
                ([name for name, _ in self.skipped], "slide", "left out"),
            ) if len(names)),
        ]  # fmt: skip

    def _about_the_graph(self) -> Iterable[str]:
        if self.units == NO_POSITIONS:
            yield "No positions: no patch has a neighbour, and the model runs uncoupled."
            return
        if self.edges_per_patch == 0 and self.n_patches > self.n_slides:
            yield (
                f"THE GRAPH IS EMPTY: not one of {self.n_patches:,} patches has a neighbour. The "
                f"step is {self.step}; probably in other units than the positions. Give step=."
            )
        elif self.without_edges:
            yield (
                f"{count(len(self.without_edges), 'slide')} with at least {MANY_INSTANCES} patches "
                f"and not one edge: {listed(self.without_edges)}. Check the step: {self.step}."
            )
        elif self.isolated > MANY_ISOLATED * self.n_patches:
            yield (
                f"{self.isolated:,} of {self.n_patches:,} patches have no neighbour. "
                f"Check the step: {self.step}."
            )


NO_PATIENTS = "not known, every slide is taken as one of its own"
NO_POSITIONS = "none"
"""`units` of a cohort without positions."""


def cohort_facts(bags: Bags) -> dict[str, Any]:
    """The fields of a report that a cohort tells by itself."""
    degree = np.diff(bags.adjacency.indptr)
    edges = np.diff(bags.adjacency.indptr[bags.offsets])
    lonely = (edges == 0) & (bags.sizes >= MANY_INSTANCES)
    return {
        "n_slides": len(bags),
        "n_patches": bags.n_instances,
        "n_features": bags.n_features,
        "dtype": str(bags.features.dtype),
        "n_patients": None if bags.groups is None else len(set(bags.groups.tolist())),
        "edges_per_patch": bags.adjacency.nnz / 2 / max(1, bags.n_instances),
        "isolated": int((degree == 0).sum()),
        "without_edges": tuple(bags.names[lonely].tolist()),
    }
