"""Patches of positive bags whose labels are known, and whether labels contradict each other."""

import numpy as np
from jaxtyping import Int

from gpmil.data.bags import Bags


def labelled_rows(bags: Bags, labels: Int[np.ndarray, " B"]) -> Int[np.ndarray, " k"]:
    """Patches of positive bags whose labels are known; a ValueError where labels contradict.

    In a negative bag the label of every patch is known without being told.
    """
    known, positive = bags.instance_labels, (labels == 1)[bags.bag_index]
    wrong = np.flatnonzero((known == 1) & ~positive)
    if len(wrong):
        raise ValueError(
            f"expected no positive patch in a negative bag, found {_place(bags, int(wrong[0]))} "
            f"labelled positive{_more(len(wrong))}: the patch's label or the bag's is wrong. "
            "Correct one of them, or set instance_labels='ignore'."
        )
    benign = np.bincount(bags.bag_index[known == 0], minlength=len(bags))
    empty = np.flatnonzero((labels == 1) & (benign == bags.sizes))
    if len(empty):
        name, size = bags.names[empty[0]], bags.sizes[empty[0]]
        raise ValueError(
            f"expected a patch in positive bag '{name}' that may be positive, found all {size} of "
            f"them labelled negative{_more(len(empty))}. Remove a label, or correct the bag's."
        )
    return np.flatnonzero((known >= 0) & positive)


def _place(bags: Bags, row: int) -> str:
    """A patch in words."""
    bag = int(bags.bag_index[row])
    where = "" if bags.coords is None else f" at {tuple(bags.coords[row].tolist())}"
    return f"patch {row - int(bags.offsets[bag])}{where} of bag '{bags.names[bag]}'"


def _more(n: int) -> str:
    return "" if n == 1 else f" (and {n - 1} more)"
