"""Climbing with few, costly values that come with their gradient: a handful of numbers.

A quadratic model with Hessian -B is trusted within a radius around the best point, and B is
mended by every value (Broyden, Fletcher, Goldfarb and Shanno), those of failed steps included. In
contrast to a line search no direction is asked twice; and B can be handed on to a problem like it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, " k"]
Slopes = Callable[[Vector], tuple[float, Vector]]  # the value to climb, and its gradient

GOOD, BAD = 0.75, 0.25  # shares of the promised rise: trust more, trust less
LARGEST = 2.0  # radius
SMALLEST = 0.02  # radius below which nothing more is expected


@dataclass
class Hill:
    """A function to climb within bounds, and what is known of it."""

    slopes: Slopes
    bounds: list[tuple[float, float]]
    B: Float[np.ndarray, "k k"]  # about its Hessian, with the opposite sign
    radius: float = 1.0

    def climb(self, begin: Vector, enough: float) -> Vector:
        """To where a step promises a rise of less than `enough`; ends early by an exception."""
        z = self._inside(begin)
        value, slope = self.slopes(z)
        while self.radius > SMALLEST:
            step = self._inside(z + self._step(z, slope)) - z
            promised = slope @ step - step @ self.B @ step / 2
            if promised < enough:
                break
            found, new = self.slopes(z + step)
            if np.isfinite(new).all():
                self._mend(step, slope - new)
            self._trust((found - value) / promised, float(np.linalg.norm(step)))
            if found > value:
                z, value, slope = z + step, found, new
                if not np.isfinite(new).all():  # the last value, asked for alone
                    break
        return z

    def _step(self, z: Vector, slope: Vector) -> Vector:
        """The best within the radius, (B + nu I)^-1 slope; not beyond a bound that z is at."""
        low, high = np.array(self.bounds).reshape(-1, 2).T
        free = ~(((z <= low) & (slope < 0)) | ((z >= high) & (slope > 0)))
        step = np.zeros_like(z)
        values, vectors = np.linalg.eigh(self.B[np.ix_(free, free)])
        along = vectors.T @ slope[free]

        def moved(nu: float) -> Vector:
            return vectors @ (along / (values + nu))

        nu = max(0.0, 1e-8 - values.min(initial=1.0))
        if np.linalg.norm(moved(nu)) > self.radius:
            low_nu, high_nu = nu, nu + np.linalg.norm(along) / self.radius
            for _ in range(60):
                nu = (low_nu + high_nu) / 2
                short = np.linalg.norm(moved(nu)) < self.radius
                low_nu, high_nu = (low_nu, nu) if short else (nu, high_nu)
        step[free] = moved(nu)
        return step

    def _inside(self, z: Vector) -> Vector:
        low, high = np.array(self.bounds).reshape(-1, 2).T
        return np.clip(z, low, high)

    def _mend(self, s: Vector, y: Vector) -> None:
        """B with B s = y, or as near to it as stays positive (Powell)."""
        Bs = self.B @ s
        curved, bent = s @ Bs, s @ y
        if bent < 0.2 * curved:
            share = 0.8 * curved / (curved - bent)
            y = share * y + (1 - share) * Bs
        self.B = self.B - np.outer(Bs, Bs) / curved + np.outer(y, y) / (s @ y)

    def _trust(self, ratio: float, length: float) -> None:
        if ratio < BAD:
            self.radius = 0.4 * length
        elif ratio > GOOD and length > 0.8 * self.radius:
            self.radius = min(2 * self.radius, LARGEST)
