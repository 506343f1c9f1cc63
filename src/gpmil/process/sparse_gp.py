"""The sparse Gaussian process: whitened features W, q(u), and predictions of m*.

    u ~ N(0, Kzz), f | u ~ N(c + A u, Kxx - Qxx), A = Kxz Kzz^-1            eqs. (u), (fgu)

Whitened: Kzz + jitter = L L', u = L w, W = Kxz L^-T, so that f has mean c + W w. With
R = I + W' Sigma W the covariance of q(w) is R^-1, and Sigma^u = L R^-1 L' (eq. sigma_u).

Instances of one bag may share an effect s_b ~ N(0, tau^2): K becomes K + tau^2 11' inside a bag,
and because Sigma 1 = 1 the covariance of m_b given f becomes Sigma_b + tau^2 11'.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpmil.coupling.operator import Part
from gpmil.process.kernels import Kernel

JITTER = 1e-6  # of the variance, on the diagonal of Kzz


@dataclass(frozen=True)
class SparseGP:
    """A kernel with its inducing points Z, L = chol(Kzz + jitter), and tau."""

    kernel: Kernel
    inducing: Float[Tensor, "M d"]
    L: Float[Tensor, "M M"]
    effect: float = 0.0  # tau, the deviation of what the instances of one bag share

    @classmethod
    def build(
        cls, kernel: Kernel, inducing: Float[Tensor, "M d"], effect: float = 0.0
    ) -> "SparseGP":
        """Factor Kzz + 1e-6 variance I (a kernel object: 1e-6 of its mean diagonal)."""
        Kzz = kernel(inducing, inducing)
        jitter = JITTER * (kernel.variance if kernel.named else Kzz.diagonal().mean())
        eye = torch.eye(len(Kzz), dtype=Kzz.dtype, device=Kzz.device)
        return cls(kernel, inducing, psd_safe_cholesky(Kzz + jitter * eye), effect)

    def within(self, x: Float[Tensor, "*b n d"], y: Float[Tensor, "*b m d"]) -> Tensor:
        """K + tau^2 of instances of one bag."""
        K = self.kernel(x, y)
        return K + self.effect**2 if self.effect else K

    def whiten(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n M"]:
        """W = Kxz L^-T."""
        return torch.linalg.solve_triangular(self.L, self.kernel(self.inducing, x), upper=False).mT


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
        return gp.L @ self.w

    def covariance_u(self, gp: SparseGP) -> Float[Tensor, "M M"]:
        """Sigma^u = L R^-1 L' (eq. sigma_u)."""
        root = torch.linalg.solve_triangular(self.chol_R, gp.L.mT, upper=False)
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
    columns: Float[Tensor, "M r1"]  # L^-T [w, Q diag(1 - 1/e)^.5]

    @classmethod
    def build(cls, gp: SparseGP, q: Posterior, c: float) -> "Predictor":
        """Directions in which the data add nothing (e = 1) are left out."""
        e, Q = torch.linalg.eigh(q.R)
        kept = e > 1 + 1e-13 * e[-1]
        root = Q[:, kept] * (1 - 1 / e[kept]).sqrt()
        right = torch.cat([q.w[:, None], root], dim=1)
        return cls(gp, c, torch.linalg.solve_triangular(gp.L.mT, right, upper=True))

    def unsmoothed(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n r1"]:
        """[W w, Y] before the coupling."""
        rows = x.reshape(-1, x.shape[-1])
        return (self.gp.kernel(rows, self.gp.inducing) @ self.columns).reshape(*x.shape[:-1], -1)


def marginal(
    predictor: Predictor, part: Part, x: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Mean and variance of every m*_i (eq. m_star), without any covariance between patches."""
    smooth = part.apply(predictor.unsmoothed(x))
    # diag S_m = diag(Sigma) + diag(Sigma K Sigma) + tau^2 - diag((Sigma Y)(Sigma Y)')
    variance = (
        part.diagonal()
        + part.congruence_diagonal(x, predictor.gp.kernel)
        + predictor.gp.effect**2
        - smooth[:, 1:].square().sum(1)
    )
    # mu_m = Sigma (c + W w) = c + Sigma W w, because Sigma 1 = 1
    return predictor.c + smooth[:, 0], variance.clamp(min=torch.finfo(torch.float64).tiny)


def joint(
    predictor: Predictor, sigma: Float[Tensor, "b n n"], x: Float[Tensor, "b n d"]
) -> tuple[Float[Tensor, "b n"], Float[Tensor, "b n n"]]:
    """Mean and covariance of m* in b bags (eqs. f_star, m_star), Sigma given as matrices."""
    before = predictor.unsmoothed(x)
    Y = before[..., 1:]
    # S = K - Y Y' before the coupling;  S_m = Sigma + Sigma S Sigma'
    S = predictor.gp.within(x, x).baddbmm_(Y, Y.mT, alpha=-1)
    S_m = torch.baddbmm(sigma, sigma @ S, sigma)
    # mu_m = Sigma (c + W w) = c + Sigma W w, because Sigma 1 = 1
    return predictor.c + (sigma @ before[..., :1])[..., 0], S_m
