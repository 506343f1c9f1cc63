"""The sparse Gaussian process: whitened features W, q(u), and predictions of m*.

    u ~ N(0, Kzz), f | u ~ N(c + A u, Kxx - Qxx), A = Kxz Kzz^-1            eqs. (u), (fgu)

Whitened: Kzz + jitter = L L', u = L w, W = Kxz L^-T, so that f has mean c + W w. With
R = I + W' Sigma W the covariance of q(w) is R^-1, and Sigma^u = L R^-1 L' (eq. sigma_u).

Instances of one bag may share an effect s_b ~ N(0, tau^2): K becomes K + tau^2 11' inside a bag,
and because Sigma 1 = 1 the covariance of m_b given f becomes Sigma_b + tau^2 11'. A slide context
(slide_context.py) adds M_s entries to w and gamma_s to K inside a bag.
"""

import functools
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpmil.coupling.operator import Dense, Part
from gpmil.fast import products, triangles
from gpmil.process.kernels import JITTER, Kernel
from gpmil.process.slide_context import Sizes, SlideContext, bag_means, to_patches


@dataclass(frozen=True)
class SparseGP:
    """A kernel with its inducing points Z, L = chol(Kzz + jitter), and tau."""

    kernel: Kernel
    inducing: Float[Tensor, "M d"]
    L: Float[Tensor, "M M"]
    effect: float = 0.0  # tau, the deviation of what the instances of one bag share
    context: SlideContext | None = None  # what their mean adds to each of them

    @classmethod
    def build(
        cls,
        kernel: Kernel,
        inducing: Float[Tensor, "M d"],
        effect: float = 0.0,
        context: SlideContext | None = None,
    ) -> "SparseGP":
        """Factor Kzz + 1e-6 variance I (a kernel object: 1e-6 of its mean diagonal)."""
        Kzz = kernel(inducing, inducing)
        jitter = JITTER * (kernel.variance if kernel.named else Kzz.diagonal().mean())
        eye = torch.eye(len(Kzz), dtype=Kzz.dtype, device=Kzz.device)
        return cls(kernel, inducing, psd_safe_cholesky(Kzz + jitter * eye), effect, context)

    @property
    def shared(self) -> float:
        """tau^2 + gamma_s: what instances of one bag have in common besides K."""
        return self.effect**2 + (0.0 if self.context is None else self.context.variance)

    @property
    def n_weights(self) -> int:
        """Entries of w: M, and M_s of the slide context."""
        return len(self.L) + (0 if self.context is None else len(self.context.L))

    @property
    def factor(self) -> Float[Tensor, "k k"]:
        """u = factor w: L, and L_s of the slide context below it."""
        return self.L if self.context is None else torch.block_diag(self.L, self.context.L)

    def within(self, x: Float[Tensor, "*b n d"], y: Float[Tensor, "*b m d"]) -> Tensor:
        """K + tau^2 + gamma_s of instances of one bag."""
        K = self.kernel(x, y)
        return K + self.shared if self.shared else K

    def first(self, m: int) -> "SparseGP":
        """The prior at the first m points, without a context: their factor is a corner of L."""
        return replace(self, inducing=self.inducing[:m], L=self.L[:m, :m], context=None)

    @functools.cached_property
    def L_inverse(self) -> Float[Tensor, "M M"]:
        """L^-1: a product with it takes a third of the time of a triangular solve, on a CPU two."""
        if not self.L.is_cuda:
            return torch.from_numpy(triangles.inverse(self.L.detach().numpy()))
        eye = torch.eye(len(self.L), dtype=self.L.dtype, device=self.L.device)
        return torch.linalg.solve_triangular(self.L, eye, upper=False)

    def whiten(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n M"]:
        """W = Kxz L^-T."""
        if not torch.is_grad_enabled():
            return self.kernel.times(x, self.inducing, self.L_inverse.mT, triangle=1)
        return torch.linalg.solve_triangular(self.L, self.kernel(self.inducing, x), upper=False).mT

    def whiten_bags(self, x: Float[Tensor, "n d"], sizes: Sizes = None) -> Float[Tensor, "n k"]:
        """[W, 1 v_b'] of whole bags, one after the other: with what their context adds."""
        W = self.whiten(x)
        return W if self.context is None else torch.cat([W, self.context.columns(x, sizes)], 1)


@dataclass(frozen=True)
class Posterior:
    """q(u) in whitened form: w = E[L^-1 u], R = Cov[L^-1 u]^-1, with its Cholesky factor."""

    w: Float[Tensor, " M"]
    R: Float[Tensor, "M M"]
    chol_R: Float[Tensor, "M M"]

    @classmethod
    def build(cls, w: Float[Tensor, " M"], R: Float[Tensor, "M M"]) -> "Posterior":
        """From the two whitened parameters."""
        return cls(w, R, torch.linalg.cholesky(R))

    def mean_u(self, gp: SparseGP) -> Float[Tensor, " M"]:
        """mu^u = L w (eq. mu_u)."""
        return gp.factor @ self.w

    def covariance_u(self, gp: SparseGP) -> Float[Tensor, "M M"]:
        """Sigma^u = L R^-1 L' (eq. sigma_u)."""
        root = torch.linalg.solve_triangular(self.chol_R, gp.factor.mT, upper=False)
        return root.mT @ root

    def shrink(self, H: Float[Tensor, "*b n M"]) -> Float[Tensor, "*b M n"]:
        """chol(R)^-1 H', whose squared columns are diag(H R^-1 H')."""
        return torch.linalg.solve_triangular(self.chol_R, H.mT, upper=False)


@dataclass(frozen=True)
class Predictor:
    """q(u) made ready for many bags: m* from the kernel between instances and inducing points.

    With R = Q diag(e) Q' the covariance that the labels leave is K - W W' + W R^-1 W' = K - Y Y',
    Y = W Q diag(1 - 1/e)^.5; W = Kxz L^-T is never formed, the triangle goes to the M x M side.
    """

    gp: SparseGP
    c: float
    columns: Float[Tensor, "k r1"]  # L^-T [w, Q diag(1 - 1/e)^.5]

    @classmethod
    def build(cls, gp: SparseGP, q: Posterior, c: float) -> "Predictor":
        """Directions in which the data add nothing (e = 1) are left out."""
        e, Q = torch.linalg.eigh(q.R)
        kept = e > 1 + 1e-13 * e[-1]
        root = Q[:, kept] * (1 - 1 / e[kept]).sqrt()
        right = torch.cat([q.w[:, None], root], dim=1)
        return cls(gp, c, torch.linalg.solve_triangular(gp.factor.mT, right, upper=True))

    def unsmoothed(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n r1"]:
        """[W w, Y] before the coupling, without what the slide's context adds."""
        rows = x.reshape(-1, x.shape[-1])
        return self.of_kernel(self.gp.kernel(rows, self.gp.inducing)).reshape(*x.shape[:-1], -1)

    def of_kernel(self, K: Float[Tensor, "n M"]) -> Float[Tensor, "n r1"]:
        """The same from K_xz, where it is known."""
        return products.matmul(K, self.columns[: len(self.gp.L)])

    def of_slides(self, means: Float[Tensor, "b d"]) -> Float[Tensor, "b r1"]:
        """What the slide's context adds to every row of [W w, Y]; the coupling leaves it alone."""
        assert self.gp.context is not None
        context = self.gp.context
        return context.kernel(context.frame(means)) @ self.columns[len(self.gp.L) :]

    def at_level(self, level: float) -> "Predictor":
        """The same where g has this mean in every slide; the variances stay."""
        columns = self.columns.clone()
        columns[len(self.gp.L) :, 0] = 0
        return replace(self, c=self.c + level, columns=columns)


def doubt(
    predictor: Predictor, x: Float[Tensor, "n d"], unsmoothed: Float[Tensor, "n r1"] | None = None
) -> Float[Tensor, " n"]:
    """Deviation of f(x_i) that the labels leave, as a share of that before them: 1, nothing known.

    Neither the noise of m nor the coupling is in it, and so nothing of the number of neighbours.
    `unsmoothed` is `predictor.unsmoothed(x)`, where it is known.
    """
    # (K - Y Y')_ii / K_ii, Y Y' = W W' - W R^-1 W'
    rows = predictor.unsmoothed(x) if unsmoothed is None else unsmoothed
    known = rows[:, 1:].square().sum(1)
    before = predictor.gp.kernel.diagonal(x)
    # a kernel that is zero at x (linear, at the origin) leaves nothing to doubt
    return torch.where(before > 0, 1 - known / before, 0.0).clamp(0, 1).sqrt()


def marginal(
    predictor: Predictor,
    part: Part,
    x: Float[Tensor, "n d"],
    sizes: Sizes = None,
    unsmoothed: Float[Tensor, "n r1"] | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Mean and variance of every m*_i (eq. m_star), without any covariance between patches."""
    smooth = part.apply(predictor.unsmoothed(x) if unsmoothed is None else unsmoothed)
    if predictor.gp.context is not None:
        smooth = smooth + to_patches(predictor.of_slides(bag_means(x, sizes)), len(x), sizes)
    # diag S_m = diag(Sigma) + diag(Sigma K Sigma) + tau^2 + gamma_s - diag((Sigma Y)(Sigma Y)')
    variance = (
        part.diagonal()
        + part.congruence_diagonal(x, predictor.gp.kernel)
        + predictor.gp.shared
        - smooth[:, 1:].square().sum(1)
    )
    # mu_m = Sigma (c + W w) = c + Sigma W w, because Sigma 1 = 1
    return predictor.c + smooth[:, 0], variance.clamp(min=torch.finfo(torch.float64).tiny)


def joint(
    predictor: Predictor,
    part: Dense,
    x: Float[Tensor, "n d"],
    unsmoothed: Float[Tensor, "n r1"] | None = None,
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p p"]]:
    """Mean and covariance of m* in b bags (eqs. f_star, m_star), side by side as in the part."""
    before = predictor.unsmoothed(x) if unsmoothed is None else unsmoothed
    if predictor.gp.context is not None:
        sizes = part.mask.sum(1)
        before = before + to_patches(predictor.of_slides(bag_means(x, sizes)), len(x), sizes)
    # S = K - Y Y' before the coupling;  S_m = Sigma + Sigma S Sigma'
    S = _before_coupling(predictor.gp, part, x, before)
    # mu_m = Sigma (c + W w) = c + Sigma W w, because Sigma 1 = 1
    mean = part.pad(part.apply(before[:, :1]))[..., 0].add_(predictor.c)
    return mean, part.congruence(S).add_(part.sigma)


def _before_coupling(
    gp: SparseGP, part: Dense, x: Float[Tensor, "n d"], rows: Float[Tensor, "n r1"]
) -> Float[Tensor, "b p p"]:
    """K + tau^2 + gamma_s - Y Y' inside every bag, of rows [W w, Y]."""
    S = gp.kernel.less(x, rows, part.mask)
    if S is not None:
        return S.add_(gp.shared) if gp.shared else S
    padded, Y = part.pad(x), part.pad(rows[:, 1:])
    return gp.within(padded, padded).baddbmm_(Y, Y.mT, alpha=-1)
