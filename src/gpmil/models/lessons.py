"""Pseudo labels of instances, and what a classifier is taught by them in one round."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from gpmil.data.graphs import bag_index

LEFT_OUT = -1
"""Pseudo label of an instance that is neither among the highest nor the lowest of its bag."""


def pseudo_labels(
    scores: Float[np.ndarray, " N"],
    positive: Bool[np.ndarray, " B"],
    offsets: Int[np.ndarray, " bags_and_one"],
    top: float,
    low: float,
) -> Int[np.ndarray, " N"]:
    """1, 0 or LEFT_OUT for every instance, by its rank in its bag.

    In a positive bag of n instances the max(1, floor(top n)) that score highest are positive and
    the floor(low n) that score lowest negative; of equal scores the earlier instance ranks
    higher. Every instance of a negative bag is negative.

    >>> pseudo_labels(np.array([0.1, 0.9, 0.4, 0.8, 7.0]), np.array([True, False]),
    ...               np.array([0, 4, 5]), top=0.25, low=0.5)
    array([ 0,  1,  0, -1,  0])
    """
    sizes, bag = np.diff(offsets), bag_index(offsets)
    order = np.lexsort((-scores, bag))  # stable: equal scores stay in the order of the rows
    rank = np.empty(len(scores), dtype=np.int64)
    rank[order] = np.arange(len(scores)) - offsets[:-1][bag]
    n_top = np.maximum(1, _share_of(top, sizes))
    n_low = np.minimum(_share_of(low, sizes), sizes - n_top)
    labels = np.full(len(scores), LEFT_OUT)
    labels[rank < n_top[bag]] = 1
    labels[rank >= (sizes - n_low)[bag]] = 0
    labels[~positive[bag]] = 0
    return labels


def _share_of(share: float, sizes: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """floor(share n), where 0.29 of 100 is 29: the product's rounding must not lose one."""
    return np.floor(share * sizes * (1 + 1e-12)).astype(np.int64)


@dataclass(frozen=True)
class Lesson:
    """What a classifier is taught in a round: rows, their labels, their weights.

    A row may come twice, once with each label, when its label is soft.
    """

    rows: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]

    @classmethod
    def of(
        cls, labels: Int[np.ndarray, " N"], probability: Float[np.ndarray, " N"] | None
    ) -> "Lesson":
        """The labelled instances; with their `probability` the others too, on both sides."""
        known = np.flatnonzero(labels != LEFT_OUT)
        hard = cls(known, labels[known], np.ones(len(known)))
        if probability is None:
            return hard
        soft = np.flatnonzero(labels == LEFT_OUT)
        p, one = probability[soft], np.ones(len(soft), dtype=np.int64)
        return cls(
            np.concatenate([hard.rows, soft, soft]),
            np.concatenate([hard.labels, one, 0 * one]),
            np.concatenate([hard.weights, p, 1 - p]),
        )

    def balanced(self) -> Float[np.ndarray, " n"]:
        """The weights, scaled so that both classes weigh the same and the mean weight is one."""
        per_class = np.bincount(self.labels, self.weights, minlength=2)
        return self.weights * len(self.rows) / (2 * per_class[self.labels])
