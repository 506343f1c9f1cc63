"""Where the inducing points Z go: k-means centres, half from positive, half from negative bags."""

import logging
import warnings

import numpy as np
from jaxtyping import Bool, Float, Int, Num
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from gpmil.features import FeatureMap

logger = logging.getLogger("gpmil")
POINTS_PER_CENTRE = 256  # more change the inertia by less than one per cent


def kmeans_by_class(
    features: Num[np.ndarray, "N D"],
    positive: Bool[np.ndarray, " N"],
    feature_map: FeatureMap,
    n_inducing: int,
    seed: int,
) -> Float[np.ndarray, "M D"]:
    """Inducing points in raw feature space; `positive` says which instances lie in positive bags.

    A class with fewer instances than centres gives them all, said once.
    """
    halves = (n_inducing - n_inducing // 2, n_inducing // 2)
    centres = []
    for rows, k, name in zip(
        (np.flatnonzero(positive), np.flatnonzero(~positive)), halves, ("positive", "negative")
    ):
        if k:
            centres.append(_centres(_sample(features, rows, k, feature_map, seed), k, seed, name))
    return feature_map.inverse(np.concatenate(centres))


def _sample(
    features: np.ndarray, rows: Int[np.ndarray, " n"], k: int, feature_map: FeatureMap, seed: int
) -> Float[np.ndarray, "m d"]:
    most = POINTS_PER_CENTRE * k
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))
    return feature_map(features[rows]).numpy()


def _centres(x: np.ndarray, k: int, seed: int, name: str) -> Float[np.ndarray, "m d"]:
    if len(x) <= k:
        if len(x) < k:
            logger.warning(
                "%d inducing points were asked for in %s bags, which hold %d instances: "
                "all of them are used.",
                k,
                name,
                len(x),
            )
        return x
    # one thread: the order of a threaded sum, and so the last bits, may change between runs
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # repeated points: fewer centres
        centres = KMeans(k, n_init=1, random_state=seed).fit(x).cluster_centers_
    return np.unique(centres, axis=0)
