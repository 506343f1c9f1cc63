"""Folds of a cohort: stratified by label, the bags of one patient kept together."""

import warnings
from logging import getLogger
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from gpmil.data.checks import count, listed

logger = getLogger("gpmil")


def folds(
    labels: Int[np.ndarray, " B"],
    groups: Shaped[np.ndarray, " B"] | None = None,
    n_folds: int = 5,
    seed: int = 0,
    unit: str = "patient",
) -> Int[np.ndarray, " B"]:
    """The fold of every bag: stratified by label, patients (groups) kept together.

    Every fold holds a negative bag and every training part both classes. Where n_folds are too
    many for that there are fewer, at least two; it is said once, with `unit` for what groups are.

    >>> folds(np.array([0, 0, 0, 1, 1, 1]), np.array(list("aabbcc")), n_folds=2)
    array([1, 1, 0, 0, 1, 1])
    """
    labels = zero_one(labels, len(labels))
    if n_folds < 2:
        raise ValueError(f"n_folds: expected at least 2, found {n_folds}.")
    _require_two_of_each(labels, groups)
    fold = fair_folds(labels, groups, n_folds, seed)
    if fold.max() + 1 < n_folds:
        kind = "negative bags" if groups is None else f"{unit}s with a negative bag"
        found = f"{fold.max() + 1} folds instead of {n_folds}"
        logger.warning("%s: there are %d %s.", found, len(_negative(labels, groups)), kind)
    return fold


def fair_folds(
    labels: Int[np.ndarray, " B"],
    groups: Shaped[np.ndarray, " B"] | None,
    n_folds: int,
    seed: int,
) -> Int[np.ndarray, " B"]:
    """The same without a word: two of each class (patients with one) are known to be there."""
    most = min(n_folds, len(_negative(labels, groups)))
    candidates = (_stratified(labels, groups, k, seed) for k in range(most, 1, -1))
    fold = next((fold for fold in candidates if _fair(fold, labels)), None)
    return _halves(labels, groups) if fold is None else fold


def _negative(labels: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """The negative bags, or the patients with one."""
    return np.flatnonzero(labels == 0) if groups is None else np.unique(groups[labels == 0])


def _stratified(labels: np.ndarray, groups: np.ndarray | None, k: int, seed: int) -> np.ndarray:
    splitter = StratifiedKFold if groups is None else StratifiedGroupKFold
    fold = np.empty(len(labels), dtype=np.int64)
    with warnings.catch_warnings():  # fewer positive bags than folds: `_fair` decides
        warnings.simplefilter("ignore", UserWarning)
        split = splitter(k, shuffle=True, random_state=seed).split(labels, labels, groups)
        for f, (_, held_out) in enumerate(split):
            fold[held_out] = f
    return fold


def _fair(fold: np.ndarray, labels: np.ndarray) -> bool:
    """A negative bag in every fold, and not all positive ones in the same.

    Then every training part has both classes: its negatives are those of another fold.
    """
    everywhere = set(fold[labels == 0]) == set(range(fold.max() + 1))
    return bool(everywhere and len(set(fold[labels == 1])) > 1)


def _halves(labels: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Two fair folds, which exist if two patients have negative and two have positive bags.

    The greedy splitter can miss them. Patients of a kind alternate, beginning with fold 0 if they
    have both classes and with fold 1 otherwise: a lone patient with both faces all the others.
    """
    patient = np.arange(len(labels)) if groups is None else codes(groups)
    negative, positive = (np.bincount(patient, labels == y) > 0 for y in (0, 1))
    half = np.empty(len(negative), dtype=np.int64)
    for kind in (negative & positive, negative & ~positive, positive & ~negative):
        start = 0 if (negative & positive & kind).any() else 1
        half[kind] = (start + np.arange(kind.sum())) % 2
    return half[patient]


def _require_two_of_each(labels: np.ndarray, groups: np.ndarray | None) -> None:
    check_groups(groups, len(labels))
    for y, name in enumerate(("negative", "positive")):
        found = np.flatnonzero(labels == y)
        if len(found) < 2:
            raise ValueError(
                f"calibration and flags need at least 2 {name} bags (better 50), found "
                f"{len(found)} among {count(len(labels), 'bag')}. Check the label column, or add "
                f"{name} bags."
            )
        holders = None if groups is None else np.unique(groups[found])
        if holders is not None and len(holders) == 1:
            raise ValueError(
                f"flags need {name} bags of at least two patients (groups); found 1: "
                f"{str(holders[0])!r} has all {len(found)} {name} bags. Patients are kept "
                f"together, so a model trained without this one would see no {name} bag. Add "
                "patients, or, if the bags are independent, drop the groups (groups=None)."
            )


# ------------------------------------------------------------------ patients left out, or whole


def share_patients(groups: Shaped[np.ndarray, " B"] | None) -> bool:
    """Whether a patient has two bags: otherwise to leave out a patient is to leave out a bag."""
    return groups is not None and len(np.unique(groups)) < len(groups)


def left_out_together(
    labels: Int[np.ndarray, " B"], groups: Shaped[np.ndarray, " B"] | None
) -> Shaped[np.ndarray, " B"] | None:
    """The patients, where one has several bags and each class is found in two patients."""
    if groups is None or not share_patients(groups):
        return None
    patients = [len(np.unique(groups[labels == y])) for y in (0, 1)]
    return groups if min(patients) > 1 else None


def whole_patients(
    labels: Int[np.ndarray, " B"], groups: Shaped[np.ndarray, " B"], most: int, seed: int
) -> Int[np.ndarray, " b"]:
    """At most so many bags of whole patients, those with a positive bag in their proportion.

    Patients come in random order; one with more bags than there is room for is passed over.
    """
    code, rng = codes(groups), np.random.default_rng(seed)
    sizes, positive = np.bincount(code), np.bincount(code, labels == 1) > 0
    chosen = np.zeros(len(sizes), dtype=bool)
    for kind in (positive, ~positive):
        room = round(most * sizes[kind].sum() / len(labels))
        for patient in rng.permutation(np.flatnonzero(kind)):
            if sizes[patient] <= room:
                chosen[patient] = True
                room -= sizes[patient]
    bags = np.flatnonzero(chosen[code])
    logger.info(
        "a subsample of %d of %d patients, %d of %d bags",
        chosen.sum(), len(sizes), len(bags), len(labels),
    )  # fmt: skip
    return bags


# ------------------------------------------------------------------ labels and patients


def codes(values: np.ndarray) -> Int[np.ndarray, " n"]:
    """Equal values as equal numbers 0, 1, ..., in the order of the values."""
    return np.unique(values, return_inverse=True)[1]


def zero_one(labels: Any, n: int) -> Int[np.ndarray, " B"]:
    """One label per bag, each 0 or 1."""
    labels = np.asarray(labels)
    if labels.shape != (n,):
        raise ValueError(f"labels: expected one per bag, {n} in all, found shape {labels.shape}.")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(
            f"labels: expected 0 or 1, found {listed(labels[~np.isin(labels, (0, 1))])}. Leave out "
            "bags without a label."
        )
    return labels.astype(np.int64)


def check_groups(groups: np.ndarray | None, n: int) -> None:
    """One group per bag, where there are groups."""
    if groups is not None and len(groups) != n:
        raise ValueError(f"groups: expected one per bag, {n} in all, found {len(groups)}.")
