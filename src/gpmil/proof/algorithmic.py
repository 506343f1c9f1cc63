"""Algorithmic unit tests of multiple instance learning (Raff and Holt, NeurIPS 2023).

Bags are drawn in such a way that a shortcut separates the classes in training and misleads at test:
a model that learned the multiple-instance rule keeps its AUC, one that did not falls to chance or
below. 16 features, half of the bags positive, background N(0, 1); numbers of instances inclusive,
spreads are standard deviations.

1. Presence: negative bags hold a poison N(-10, .1) and 1 to 9 background; positive ones 1 to 3 of
   N(0, 3) and 1 to 4 background. At test the poison is in the positive bags.
2. Either of two: A = N(2, .1), B = N(3, .1). Negative bags hold the poison, one A or one B, and 1
   to 4 background; positive ones 1 to 4 A, 1 to 4 B, 1 to 4 background, and in one of ten the
   poison. At test no negative bag has the poison, every positive one has it.
3. Both of two: A = N(-2, .1), B = N(2, .1). Negative bags hold one A or one B and 1 to 9
   background, positive ones one of each and 1 to 9 background. At test negative bags hold 35 to 39
   copies. The rule "one positive instance makes a bag positive" cannot say this.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from gpmil.data.bags import Bags

D = 16
Instances = Float[np.ndarray, "n 16"]
Draw = Callable[[np.random.Generator, int, bool], list[Instances]]

TITLES = {1: "presence", 2: "either of two", 3: "both of two"}


def _some(rng: np.random.Generator, mean: float, sd: float, least: int, most: int) -> Instances:
    """From `least` to `most` instances N(mean, sd^2)."""
    return rng.normal(mean, sd, (int(rng.integers(least, most, endpoint=True)), D))


def _poison(rng: np.random.Generator, present: bool) -> Instances:
    return _some(rng, -10.0, 0.1, int(present), int(present))


def _presence(rng: np.random.Generator, y: int, moved: bool) -> list[Instances]:
    poison = _poison(rng, present=bool(y) == moved)
    if y == 0:
        return [poison, _some(rng, 0.0, 1.0, 1, 9)]
    return [poison, _some(rng, 0.0, 3.0, 1, 3), _some(rng, 0.0, 1.0, 1, 4)]


def _either(rng: np.random.Generator, y: int, moved: bool) -> list[Instances]:
    if y == 0:
        concept = 2.0 + float(rng.integers(2))
        return [
            _poison(rng, not moved),
            _some(rng, concept, 0.1, 1, 1),
            _some(rng, 0.0, 1.0, 1, 4),
        ]
    poison = _poison(rng, moved or bool(rng.random() < 0.1))
    two = [_some(rng, mean, 0.1, 1, 4) for mean in (2.0, 3.0)]
    return [poison, *two, _some(rng, 0.0, 1.0, 1, 4)]


def _both(rng: np.random.Generator, y: int, moved: bool) -> list[Instances]:
    least, most = (35, 39) if moved and y == 0 else (1, 1)
    concepts = (-2.0, 2.0) if y else (-2.0 if rng.integers(2) else 2.0,)
    own = [_some(rng, mean, 0.1, least, most) for mean in concepts]
    return [*own, _some(rng, 0.0, 1.0, 1, 9)]


DRAWS: dict[int, Draw] = {1: _presence, 2: _either, 3: _both}


def draw(test: int, n_bags: int, seed: int, moved: bool = False) -> Bags:
    """Bags of one of the three tests, every second one positive; `moved`: as at test.

    >>> bags = draw(1, 10, seed=0)
    >>> bags.labels.tolist(), bags.features.shape[1]
    ([0, 1, 0, 1, 0, 1, 0, 1, 0, 1], 16)
    """
    rng = np.random.default_rng((seed, test, int(moved)))
    labels = np.arange(n_bags) % 2
    arrays = [np.concatenate(DRAWS[test](rng, int(y), moved)) for y in labels]
    return Bags.from_arrays(arrays, labels=labels)
