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
    classes = {"positive": np.flatnonzero(positive), "negative": np.flatnonzero(~positive)}
    wanted = {"positive": n_inducing - n_inducing // 2, "negative": n_inducing // 2}
    short = {name: len(rows) for name, rows in classes.items() if len(rows) < wanted[name]}
    if short:
        logger.warning(
            "%d inducing points were asked for, half in positive and half in negative bags; there "
            "are only %s instances: all of them are used.",
            n_inducing,
            " and ".join(f"{n} {name}" for name, n in short.items()),
        )
    centres = [
        _centres(_sample(features, rows, wanted[name], feature_map, seed), wanted[name], seed)
        for name, rows in classes.items()
    ]
    return feature_map.inverse(np.concatenate(centres))


def _sample(
    features: np.ndarray, rows: Int[np.ndarray, " n"], k: int, feature_map: FeatureMap, seed: int
) -> Float[np.ndarray, "m d"]:
    most = POINTS_PER_CENTRE * k
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))
    return feature_map(features[rows]).numpy()


def _centres(x: np.ndarray, k: int, seed: int) -> Float[np.ndarray, "m d"]:
    if len(x) <= k:
        return x
    # one thread: the order of a threaded sum, and so the last bits, may change between runs
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # repeated points: fewer centres
        centres = KMeans(k, n_init=1, random_state=seed).fit(x).cluster_centers_
    return np.unique(centres, axis=0)
