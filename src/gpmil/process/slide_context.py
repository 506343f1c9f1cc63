"""The slide context: a second process g on the slide's mean feature, added to f in every patch.

    m_b | f, g ~ N(Sigma_b (f_b + g(z_b) 1), Sigma_b + tau^2 11'),  g ~ GP(0, gamma_s k_s)

z_b is the mean of the bag's kernel inputs, centred over the training slides and divided by one
number, so that its mean square is one per column. Sparse as f is, with inducing points among the
training slides: g(z_b) has mean v_b'w_s, v_b = k_s(z_b, Z_s) L_s^-T. The row v_b is the same for
every patch of the bag, and because Sigma 1 = 1 the coupling leaves it alone: W_b becomes
[W_b, 1 v_b'], H_b becomes [H_b, 1 v_b'], and K inside a bag gets gamma_s more.

g breaks the multiple-instance rule on purpose. It can learn stain or site, and a benign patch more
may lower the slide's probability.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpmil.process.kernels import JITTER, Kernel

Sizes = Int[Tensor, " b"] | None  # of some whole bags; None: a single one
MOST_POINTS = 100  # inducing points of g: all slides of a small cohort, k-means of a larger one


def bag_means(x: Float[Tensor, "n d"], sizes: Sizes = None) -> Float[Tensor, "b d"]:
    """The mean row of every bag; x holds whole bags, one after the other, or only one."""
    if sizes is None:
        return x.mean(0, keepdim=True)
    own = torch.arange(len(sizes), device=x.device).repeat_interleave(sizes)
    return x.new_zeros(len(sizes), x.shape[1]).index_add_(0, own, x) / sizes[:, None]


def to_patches(rows: Float[Tensor, "b k"], n: int, sizes: Sizes = None) -> Float[Tensor, "n k"]:
    """The row of every bag, for each of its n patches together."""
    return rows.expand(n, -1) if sizes is None else rows.repeat_interleave(sizes, 0)


@dataclass(frozen=True)
class Frame:
    """Where z = 0 is, and how long one unit is: from the mean of a bag's inputs to z."""

    center: Float[Tensor, " d"]
    scale: Float[Tensor, " s"]  # one number, or one per column where columns have weights

    @classmethod
    def of(cls, means: Float[Tensor, "B d"]) -> "Frame":
        """The training slides have mean zero, and mean square one over all columns."""
        center = means.mean(0)
        scale = (means - center).square().mean().sqrt()
        # slides that are all the same to rounding have no scale
        flat = scale <= 1e-12 * center.abs().max()
        return cls(center, torch.where(flat, torch.ones_like(scale), scale)[None])

    def __call__(self, means: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """z of some bags."""
        return (means - self.center) / self.scale


def factor(
    points: Float[Tensor, "m d"], variance: float | Tensor, lengthscale: float | Tensor
) -> Float[Tensor, "m m"]:
    """L_s = chol(gamma_s (k_s(Z_s, Z_s) + jitter))."""
    unit = Kernel("rbf", 1.0, lengthscale)(points, points)
    eye = torch.eye(len(unit), dtype=unit.dtype, device=unit.device)
    return psd_safe_cholesky(variance * (unit + JITTER * eye))


def whitened(
    z: Float[Tensor, "b d"],
    points: Float[Tensor, "m d"],
    variance: float | Tensor,
    lengthscale: float | Tensor,
) -> Float[Tensor, "b m"]:
    """v = k_s(z, Z_s) L_s^-T, to differentiate in both settings or not."""
    L = factor(points, variance, lengthscale)
    K = Kernel("rbf", variance, lengthscale)(points, z)
    return torch.linalg.solve_triangular(L, K, upper=False).mT


@dataclass(frozen=True)
class SlideContext:
    """g with its settings gamma_s and length, its inducing points Z_s, and the way to z."""

    frame: Frame
    points: Float[Tensor, "m d"]
    variance: float
    lengthscale: float
    L: Float[Tensor, "m m"]

    @classmethod
    def build(
        cls, frame: Frame, points: Float[Tensor, "m d"], variance: float, lengthscale: float
    ) -> "SlideContext":
        """Factor the kernel at the inducing points."""
        return cls(frame, points, variance, lengthscale, factor(points, variance, lengthscale))

    def to(self, device: torch.device | str) -> "SlideContext":
        """The same elsewhere."""
        frame = Frame(self.frame.center.to(device), self.frame.scale.to(device))
        return replace(self, frame=frame, points=self.points.to(device), L=self.L.to(device))

    def kernel(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b m"]:
        """k_s(z_b, Z_s)."""
        return Kernel("rbf", self.variance, self.lengthscale)(z, self.points)

    def at(self, z: Float[Tensor, "b d"]) -> Float[Tensor, "b m"]:
        """v_b = k_s(z_b, Z_s) L_s^-T."""
        return torch.linalg.solve_triangular(self.L, self.kernel(z).mT, upper=False).mT

    def columns(self, x: Float[Tensor, "n d"], sizes: Sizes = None) -> Float[Tensor, "n m"]:
        """1 v_b': what every patch of some whole bags has beside its own W."""
        return to_patches(self.at(self.frame(bag_means(x, sizes))), len(x), sizes)
