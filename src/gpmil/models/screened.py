"""ScreenedMIL: any model of bags, on the columns that tell positive bags from negative ones.

A kernel with one length for all columns cannot find one telling feature among hundreds: distances
are those of the others. Screening asks of every column, before the fit and by bags' labels alone,
whether the mean of a bag, or its spread, differs between the classes.

What surrounds an instance can be a feature of it, too: beside x_i stands the mean of its
neighbours, sum_j A_ij x_j / sum_j A_ij, and both are screened.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import diags_array
from scipy.stats import false_discovery_control, ttest_ind
from sklearn.base import clone

from gpmil.data.bags import Bags
from gpmil.models.base import BagClassifier, InstancePredictions, Predictions
from gpmil.models.checks import flag, number

ROWS = 2**16  # features looked at together, to bound memory


@dataclass(eq=False, repr=False)
class ScreenedMIL(BagClassifier):
    """A model of bags that sees the columns which differ between positive and negative bags.

    Parameters
    ----------
    model : a model of bags
        Cloned, and fitted to what is left.
    rate : float
        False discovery rate of the columns that are kept (Benjamini and Hochberg); where none
        differs, all are kept.
    neighbours : bool
        Offer the means of neighbours as columns as well, D of them after the D features.

    Attributes
    ----------
    columns_ : the columns that are kept; from D on, means of neighbours
    p_values_ : one per column, small where the mean or the spread of a bag differs
    model_ : the fitted model

    Examples
    --------
    >>> import numpy as np, gpmil
    >>> from gpmil.models import ScreenedMIL
    >>> rng = np.random.default_rng(0)
    >>> x = [rng.normal(size=(8, 60)) for b in range(40)]
    >>> for one in x[1::2]:
    ...     one[:3, 7] += 3
    >>> bags = gpmil.Bags.from_arrays(x, labels=[b % 2 for b in range(40)])
    >>> model = ScreenedMIL(gpmil.MeanPoolMIL(max_epochs=1, random_state=0)).fit(bags)
    >>> 7 in model.columns_, len(model.columns_) < 6
    (True, True)
    """

    model: Any = None
    rate: Any = 0.05
    neighbours: Any = False
    verbose: Any = False

    def _fit(self, bags: Bags, y) -> None:
        number("rate", self.rate, above=0)
        flag("neighbours", self.neighbours)
        if self.rate >= 1 or not isinstance(self.model, BagClassifier):
            raise ValueError(
                "ScreenedMIL needs a model of bags and a rate below 1, got model="
                f"{self.model!r}, rate={self.rate!r}. As in ScreenedMIL(gpmil.VGPMILPRI())."
            )
        if self.neighbours and not bags.adjacency.nnz:
            raise ValueError(
                "neighbours=True: no instance of these bags has neighbours. Give coords or edges "
                "to Bags, or leave it out."
            )
        labels = self._remember_cohort(bags, y)
        self.p_values_ = column_p_values(bags, labels, self.neighbours)
        differs = false_discovery_control(self.p_values_) <= self.rate
        self.columns_ = np.flatnonzero(differs if differs.any() else np.ones_like(differs))
        kept = bags.with_features(screened_columns(bags, self.columns_))
        self.model_ = clone(self.model).fit(kept, labels)

    def _kept(self, bags) -> Bags:
        bags = self._check_predictable(bags)
        return bags.with_features(screened_columns(bags, self.columns_))

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(y_b = 0) of each bag, and the error of that number, as the model has them."""
        return self.model_.log_proba_negative(self._kept(bags))

    def _calibrate(self, log_p: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        return self.model_._calibrate(log_p)

    def predict_instances(self, bags, **asked: Any) -> InstancePredictions:
        """As the model's own."""
        return replace(self.model_.predict_instances(self._kept(bags), **asked), bags=bags)

    def predict_all(self, bags, **asked: Any) -> Predictions:
        """As the model's own."""
        found = self.model_.predict_all(self._kept(bags), **asked)
        if found.instances is None:
            return found
        return replace(found, instances=replace(found.instances, bags=bags))


def screened_columns(bags: Bags, columns: Int[np.ndarray, " k"]) -> Float[np.ndarray, "N k"]:
    """Features of these numbers; from D on, the mean of that feature over the neighbours.

    An instance without neighbours is its own.
    """
    of, D = bags.features, bags.n_features
    own, others = columns[columns < D], columns[columns >= D] - D
    if not len(others):
        return of[:, own]
    A = bags.adjacency + diags_array((bags.adjacency.sum(axis=1) == 0).astype(float))
    means = (A @ of[:, others].astype(np.float64)) / A.sum(axis=1)[:, None]
    return np.hstack([of[:, own], means.astype(of.dtype)])


def column_p_values(
    bags: Bags, labels: Int[np.ndarray, " B"], neighbours: bool = False
) -> Float[np.ndarray, " D"]:
    """How likely so large a difference between the classes is by chance, for every column.

    The smaller p-value of two Welch tests on bags, doubled: of their means, and of their mean
    squares about the mean of all instances. Patches of a bag are alike, so that bags are counted.
    """
    found = np.empty(bags.n_features * (1 + neighbours))
    width = max(1, ROWS * 64 // max(1, bags.n_instances))
    for start in range(0, len(found), width):
        columns = np.arange(start, min(start + width, len(found)))
        x = screened_columns(bags, columns).astype(np.float64)
        x -= x.mean(axis=0)
        sizes = bags.sizes[:, None]
        tests = [
            ttest_ind(*(of[labels == k] for k in (0, 1)), axis=0, equal_var=False).pvalue
            for of in (
                np.add.reduceat(x, bags.offsets[:-1]) / sizes,
                np.add.reduceat(x**2, bags.offsets[:-1]) / sizes,
            )
        ]
        # a constant column has no p-value, and tells nothing
        found[columns] = np.minimum(1, 2 * np.nan_to_num(np.minimum(*tests), nan=1.0))
    return found
