"""Patches that a fitted model would have labelled next."""

import numpy as np
from jaxtyping import Int

from gpmil.data.bags import Bags
from gpmil.decide.suggest import alike, information, spread
from gpmil.models.fitted import FittedGP
from gpmil.process.features import FeatureMap

COMPARED = 500  # patches that stand for all that a label may tell about
MOST = 50_000  # patches that are looked at


def suggest(
    model: FittedGP, bags: Bags, count: int = 6, per_slide: int = 1, seed: int = 0
) -> Int[np.ndarray, " k"]:
    """The rows of `bags` whose labels are expected to change the maps most, the best first.

    Patches of positive bags that have no label yet, `per_slide` of a bag at most; in a negative bag
    every label is known. See `gpmil.decide.suggest`.
    """
    rng = np.random.default_rng(seed)
    chosen = _some_positive(bags, rng)
    part = bags[chosen]
    asked = np.flatnonzero(part.instance_labels < 0)
    if not len(asked):
        return asked
    said = model.predict_instances(part)
    seen = FeatureMap(model.feature_mean_, model.feature_scale_, model.feature_components_)
    some = rng.choice(asked, min(COMPARED, len(asked)), replace=False)
    z, others = (seen(np.asarray(part.features[of])).numpy() for of in (asked, np.sort(some)))
    length = float(model.lengthscale_ or np.sqrt(z.shape[1]))
    # E[change] ~ I(y; f) mean_j k(x, x_j) / k(x, x)
    score = information(said.mean[asked], said.std[asked]) * alike(z, others, length)
    best = asked[spread(score, part.bag_index[asked], count, per_slide)]
    of = part.bag_index[best]
    return bags.offsets[chosen[of]] + best - part.offsets[of]


def _some_positive(bags: Bags, rng: np.random.Generator) -> Int[np.ndarray, " b"]:
    """Positive bags in their order; of a large cohort some, drawn at random."""
    positive = rng.permutation(np.flatnonzero(bags.labels == 1))
    few = np.cumsum(bags.sizes[positive]) <= MOST
    few[:1] = True
    return np.sort(positive[few])
