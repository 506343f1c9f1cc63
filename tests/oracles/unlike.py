"""The likeliest falling density of p-values, by its definition as a minimum of maxima."""

import numpy as np


def falling_density(p, at):
    """g(x) = min over a < x of max over b >= x of (F(b) - F(a)) / (b - a), point by point."""
    places = sorted({0.0, 1.0, *p})
    F = {a: float(np.mean(p <= a)) if a > 0 else 0.0 for a in places}

    def g(x):
        left, right = [a for a in places if a < x], [b for b in places if b >= x]
        return min(max((F[b] - F[a]) / (b - a) for b in right) for a in left)

    return np.array([g(x) for x in at])
