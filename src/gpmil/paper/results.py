"""What the fitted models said of the test slides: everything that tables and figures need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gpmil.data.bags import Bags
from gpmil.paper.methods import Method


@dataclass(frozen=True)
class MethodRun:
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
    runs: dict[str, list[MethodRun]]  # by Method.key
    images: Path | None = None  # folder with one image per slide, where there are any

    def of(self, key: str) -> list[MethodRun]:
        """The runs of one method; none where it was not run."""
        return self.runs.get(key, [])

    def method(self, key: str) -> Method:
        """The method of a key."""
        return next(m for m in self.methods if m.key == key)

    def were_run(
        self, keys: Sequence[str] | None = None
    ) -> Iterator[tuple[Method, list[MethodRun]]]:
        """The methods of some keys (all by default) that were run, each with its runs."""
        by_key = {method.key: method for method in self.methods}
        for key in by_key if keys is None else keys:
            if key in by_key and self.of(key):
                yield by_key[key], self.of(key)

    @property
    def known(self) -> Bool[np.ndarray, " N"]:
        """Which test patches have a known label."""
        assert self.test.instance_labels is not None
        return self.test.instance_labels >= 0

    @property
    def patch_truth(self) -> Int[np.ndarray, " n"]:
        """The labels of those."""
        return self.test.instance_labels[self.known]

    @property
    def knows_patches(self) -> bool:
        """Whether test patches of both classes have known labels."""
        return self.test.instance_labels is not None and {0, 1} <= set(self.test.instance_labels)
