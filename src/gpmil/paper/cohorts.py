"""The data of the experiments: simulated in the numbers of the paper, or the user's own."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from gpmil import io, simulate
from gpmil.data.bags import Bags
from gpmil.data.checks import listed
from gpmil.io import formats, plain, tables
from gpmil.io.labels import column_of, key, read_table

PANDA_TEST = 0.2  # share of the slides; the paper takes the split of another publication
SIMULATED = (
    "The slides are simulated, not those of the paper: no number here can be expected to equal the "
    "paper's, and the difference says how the data differ as much as how the models do."
)


@dataclass(frozen=True)
class StudyData:
    """Pairs of training and test slides: one pair for a given split, one per fold without."""

    slug: str
    name: str
    source: str  # what the data are, and how they differ from the paper's
    pairs: Sequence[tuple[Bags, Bags]]
    test: Bags  # the test slides of all pairs, one after the other
    images: Path | None = None

    @property
    def train(self) -> Bags:
        """The training slides of the first pair."""
        return self.pairs[0][0]

    @property
    def n_instances(self) -> int:
        """Training patches of all pairs."""
        return sum(train.n_instances for train, _ in self.pairs)

    def fingerprint(self) -> str:
        """Changes when the data do."""
        digest = hashlib.blake2b(digest_size=12)
        for train, test in self.pairs:
            for bags in (train, test):
                for array in (bags.features, bags.offsets, bags.labels, bags.adjacency.indices):
                    digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Drawn:
    """Simulated training and test bags, drawn where they are needed: `slug` says all of them."""

    slug: str
    name: str
    draw: Callable[[], tuple[Bags, Bags]]
    n_instances: float  # training instances, roughly

    @property
    def pairs(self) -> Sequence[tuple[Bags, Bags]]:
        """The one pair, drawn anew every time."""
        return [self.draw()]

    def fingerprint(self) -> str:
        """The same bags have the same."""
        return self.slug


def one_pair(slug: str, name: str, source: str, train: Bags, test: Bags, images=None) -> StudyData:
    """A cohort with one split."""
    return StudyData(slug, name, source, [(train, test)], test, images)


def _counted(train: Bags, test: Bags) -> str:
    return (
        f"{len(train)} slides to train on ({train.labels.sum()} positive, {train.n_instances:,} "
        f"patches) and {len(test)} to test on ({test.labels.sum()} positive, "
        f"{test.n_instances:,} patches)"
    )


# --- Simulated ------------------------------------------------------------------------------------
def sicapv2_like(seed: int = 0, quick: bool = False) -> StudyData:
    """95 training and 31 test slides, as in SICAPv2; quick: 24 and 12."""
    if quick:
        train = simulate.cohort(24, 16, n_features=32, seed=seed, part=0)
        test = simulate.cohort(12, 8, n_features=32, seed=seed, part=1)
    else:
        train, test = simulate.sicapv2_like(seed)
    words = f"{SIMULATED} {_counted(train, test)}; SICAPv2 has 95 (70; 15,132) and 31 (25; 5,246)."
    name = "simulated cohort" if quick else "simulated SICAPv2-like cohort"
    return one_pair("sicapv2-like", name, words, train, test)


def panda_like(scale: float, seed: int = 0, quick: bool = False) -> StudyData:
    """A share of 10,503 slides, 72 % of them positive; a fifth of them to test on."""
    n_all = max(40, round(10_503 * scale))
    n_test = round(PANDA_TEST * n_all)
    settings: dict[str, Any] = {"n_features": 32 if quick else 128, "mean_size": 105.5}
    pieces = [
        # parts 2 and 3: other slides than the SICAPv2-like ones
        simulate.cohort(n, round(0.72 * n), seed=seed, part=part, **settings)
        for part, n in enumerate((n_all - n_test, n_test), start=2)
    ]
    patches = sum(piece.n_instances for piece in pieces)
    words = (
        f"{SIMULATED} {n_all:,} slides of {patches:,} patches, 72 % positive, {n_test:,} of them "
        "to test on; the paper has 10,503 slides of 1,107,931 patches and takes the split of "
        "another publication."
    )
    return one_pair("panda-like", "simulated PANDA-like cohort", words, *pieces)


# --- The user's -----------------------------------------------------------------------------------
def from_files(
    path: Path, n_folds: int = 5, images: Path | None = None, **reading: Any
) -> StudyData:
    """A readable cohort: with a train and a test part, or cross-validated without.

    `reading` are options of `gpmil.read`: slide files, or a table of labels, are read by it. Parts
    are told by a column `split` of the table of patches or labels.
    """
    parts = {name: _labelled(bags, path) for name, bags in _parts(Path(path), reading).items()}
    slug = "".join(c if c.isalnum() else "-" for c in Path(path).stem.lower())
    if "train" in parts and "test" in parts:
        return _given_split(slug, path, parts, images)
    if len(parts) > 1:
        raise ValueError(
            f"{path} has the parts {sorted(parts)}: expected one called 'train' and one called "
            "'test' in the split column, or no split at all (then it is cross-validated)."
        )
    return _folded(slug, path, next(iter(parts.values())), n_folds, images)


def _parts(path: Path, reading: Mapping[str, Any]) -> dict[str, Bags]:
    kind = reading.get("format")
    slide_files = (
        path.exists() and kind not in plain.FORMATS and formats.find(path, kind) is not None
    )
    if slide_files or "labels" in reading:
        return _by_split(io.read(path, **reading), reading)
    if kind is not None:
        raise ValueError(f"--format {kind}: {path} is no folder of slide files: leave it out.")
    # There are no features to be kept: the table is read into memory.
    return io.read_splits(path, **{k: v for k, v in reading.items() if k != "cache"})


def _by_split(bags: Bags, reading: Mapping[str, Any]) -> dict[str, Bags]:
    """The parts that a column `split` of the label table names; all as one without."""
    if reading.get("labels") is None:
        return {"all": bags}
    given = reading.get("slide")
    where, frame, _ = read_table(
        reading["labels"], reading.get("slide_table"), given, reading.get("patient")
    )
    split = tables.like(("split",), list(frame))
    slide = column_of("slide", given, frame, where)
    if split is None or frame[split].isna().all():
        return {"all": bags}
    part = dict(zip(frame[slide].map(key), frame[split].fillna("")))
    of = np.array([part.get(key(name), "") for name in bags.names])
    parts = {name: bags[of == name] for name in dict.fromkeys(of.tolist()) if name}
    _require_apart(parts, reading["labels"])
    return parts


def _require_apart(parts: Mapping[str, Bags], labels: Any) -> None:
    """A patient who is trained on and tested would flatter every method."""
    groups = [parts[name].groups for name in ("train", "test") if name in parts]
    if len(groups) == 2 and groups[0] is not None and groups[1] is not None:
        both = np.intersect1d(groups[0], groups[1])
        if len(both):
            raise ValueError(
                f"{labels}: {len(both)} patients are both in train and in test: {listed(both)}. "
                "Slides of a patient belong together."
            )


def _labelled(bags: Bags, path: Path) -> Bags:
    known = bags.labels >= 0
    if len(bags) and not known.any():
        raise ValueError(f"{path} has no slide labels: the experiments need one for each.")
    return bags if known.all() else bags[known]


def _given_split(
    slug: str, path: Path, parts: Mapping[str, Bags], images: Path | None
) -> StudyData:
    train, test = parts["train"], parts["test"]
    words = (
        f"Read from {Path(path).name}: {_counted(train, test)}. The paper's numbers are those of "
        "SICAPv2 with 95 + 31 slides; they are comparable only if these are the same."
    )
    return one_pair(slug, Path(path).stem, words, train, test, images)


def _folded(slug: str, path: Path, bags: Bags, n_folds: int, images: Path | None) -> StudyData:
    bags = bags[np.argsort(bags.names.astype(str), kind="stable")]
    if n_folds < 2 or min(np.bincount(bags.labels, minlength=2)) < n_folds:
        raise ValueError(
            f"{n_folds} folds need at least two, and as many slides of each class as folds; {path} "
            f"has {(bags.labels == 0).sum()} negative and {(bags.labels == 1).sum()} positive. "
            "Choose --folds accordingly."
        )
    folds = StratifiedKFold(n_folds, shuffle=True, random_state=0)
    if bags.groups is not None:
        folds = StratifiedGroupKFold(n_folds, shuffle=True, random_state=0)
        _require_patients(bags, n_folds, path)
    cuts = list(folds.split(np.zeros(len(bags)), bags.labels, bags.groups))
    words = (
        f"Read from {Path(path).name}: {len(bags)} slides ({bags.labels.sum()} positive), "
        f"{bags.n_instances:,} patches, without a split: {n_folds} folds, every slide predicted by "
        f"the model that has not seen it{'' if bags.groups is None else ', nor its patient'}, "
        "predictions pooled. The paper's numbers are those of SICAPv2's own split (95 + 31 slides) "
        "and not comparable one to one."
    )
    test = bags[np.concatenate([cut[1] for cut in cuts])]
    pairs = [(bags[a], bags[b]) for a, b in cuts]
    return StudyData(slug, Path(path).stem, words, pairs, test, images)


def _require_patients(bags: Bags, n_folds: int, path: Path) -> None:
    """As many patients with a slide of each class as folds: no training part is of one class."""
    assert bags.groups is not None
    negative, positive = (len(np.unique(bags.groups[bags.labels == y])) for y in (0, 1))
    if min(negative, positive) < n_folds:
        raise ValueError(
            f"{n_folds} folds need as many patients with slides of each class, as a patient stays "
            f"in one fold; {path} has {negative} with a negative and {positive} with a positive "
            "slide. Choose --folds accordingly."
        )
