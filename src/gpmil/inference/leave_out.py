"""The log likelihood of every bag's label with that bag left out, from a single fit.

Bag b is taken out of the optimum w by one Newton step of the problem without it, for some bags at
a time as padded matrices. With J the Jacobian of the optimality condition at w (the Hessian of
the collapsed bound, or that of the paper's fixed point), J_b the part of it that bag b adds and
g_b its part of the condition itself,

    w_-b = w - (J - J_b)^-1 g_b,

all of it seen through the bag's own rows: n_b x n_b matrices, never M x M. The covariance needs no
label, so taking the bag out of it is exact:

    S_-b = Sigma + Sigma (K - W W' + W R_-b^-1 W') Sigma,  R_-b = R - W_b'H_b.

With a slide effect K and the covariance of m_b given f have tau^2 11' more. Then W below stands for
(Sigma + tau^2 11')^-1 H, so that W'H is what bag b adds to R in either case.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling.operator import Dense
from gpmil.moments import orthant, taught
from gpmil.moments.coupled import cut_slope
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group, downdate, has_effect
from gpmil.moments.taught import TaughtPatches
from gpmil.moments.truncated import log_not
from gpmil.moments.with_effect import PatchesWithEffect
from gpmil.process.sparse_gp import SparseGP

# Times the step that ignores the bag's own curvature: beyond it Newton has lost its way.
LONGEST = 10.0


class Bag(NamedTuple):
    """b bags padded to p instances, the rows of W and H zero in the padding."""

    mask: Bool[Tensor, "b p"]
    positive: Bool[Tensor, " b"]
    W: Float[Tensor, "b p M"]  # (Sigma + tau^2 11')^-1 H
    H: Float[Tensor, "b p M"]  # Sigma times the whitened features
    sigma: Float[Tensor, "b p p"]  # Sigma
    K: Float[Tensor, "b p p"]  # with tau^2 and gamma_s
    effect: float | Float[Tensor, ""] = 0.0  # tau
    known: Int[Tensor, "b p"] | None = None  # labels of instances, -1 where unknown and padded

    def with_known(self, labels: Int[Tensor, " n"]) -> "Bag":
        """The same where labels of instances are known; one bag after the other."""
        known = torch.full_like(self.mask, -1, dtype=labels.dtype)
        return self._replace(known=known.masked_scatter(self.mask, labels))

    @property
    def given_f(self) -> Float[Tensor, "b p p"]:
        """Sigma + tau^2 11', the covariance of m given f."""
        if not has_effect(self.effect):
            return self.sigma
        return self.sigma + self.effect**2 * (self.mask[:, :, None] & self.mask[:, None, :])


def padded_bag(gp: SparseGP, part: Dense, x: Tensor, positive: Tensor) -> Bag:
    """Some bags as a fit sees them; x (n, d) are their kernel inputs, one bag after the other."""
    W, padded = part.pad(gp.whiten_bags(x, part.mask.sum(1))), part.pad(x)
    H, K = part.sigma @ W, gp.within(padded, padded)
    return Bag(
        part.mask, positive, less_shared(W, part.mask, gp.effect), H, part.sigma, K, gp.effect
    )


def less_shared(
    W: Float[Tensor, "b p M"], mask: Bool[Tensor, "b p"], effect: float | Tensor
) -> Float[Tensor, "b p M"]:
    """(Sigma + tau^2 11')^-1 Sigma W = W - k 1 1'W, k = tau^2 / (1 + tau^2 n)."""
    if not has_effect(effect):
        return W
    share = downdate(effect, mask.sum(-1))[:, None, None]
    return W - share * mask[..., None] * W.sum(1, keepdim=True)


class Optimum(NamedTuple):
    """Where the fit ended: w, R = I + sum_b W_b'H_b, and the Jacobian J of its condition."""

    w: Float[Tensor, " M"]
    c: float | Tensor
    R_inverse: Float[Tensor, "M M"]
    J_inverse: Float[Tensor, "M M"]


def flat(bag: Bag, x: Float[Tensor, "b p"]) -> tuple[Tensor, Tensor]:
    """The instances of the bags one after the other, and where each bag begins."""
    sizes = bag.mask.sum(-1)
    return x[bag.mask], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def spread(bag: Bag, x: Float[Tensor, "n ..."]) -> Float[Tensor, "b p ..."]:
    """Back to padded rows, zeros where there is no instance."""
    mask = bag.mask.view(*bag.mask.shape, *(1 for _ in x.shape[1:]))
    return x.new_zeros(*bag.mask.shape, *x.shape[1:]).masked_scatter(mask, x)


class Curvature(NamedTuple):
    """gamma = d log Z / d mu, and A = -d2 log Z / d mu2 = diag(bend) + left right'."""

    gamma: Float[Tensor, "b p"]
    bend: Float[Tensor, "b p"]
    left: Float[Tensor, "b p r"]
    right: Float[Tensor, "b p r"]

    def times(self, G: Float[Tensor, "b k p"]) -> Float[Tensor, "b k p"]:
        """G A, without the matrix A."""
        out = G * self.bend[:, None, :]
        for left, right in zip(self.left.unbind(-1), self.right.unbind(-1)):
            out = out + (G @ left[..., None]) * right[:, None, :]
        return out


def patches(bag: Bag) -> IndependentPatches | PatchesWithEffect | TaughtPatches:
    """The likelihood of the instances, one bag after the other."""
    deviation, offsets = flat(bag, bag.sigma.diagonal(dim1=-2, dim2=-1).sqrt())
    rows = slice(0, len(deviation))
    known = None if bag.known is None else bag.known[bag.mask]
    return taught.patches(
        Group(deviation, offsets, bag.positive, None, rows, effect=bag.effect, known=known)
    )


def curvature(bag: Bag, mu: Float[Tensor, "b p"]) -> Curvature:
    """The first two derivatives of log Z of independent patches."""
    gamma, _, A = patches(bag).curvature(mu[bag.mask])
    return Curvature(*(spread(bag, x) for x in (gamma, A.diagonal, A.left, A.right)))


def mean_direct(bag: Bag, at: Optimum) -> Float[Tensor, "b p"]:
    """mu_b at the maximum of the bound without bag b: J is the Hessian of minus the bound."""
    mu = at.c + bag.H @ at.w
    bent = curvature(bag, mu)
    G = bag.H @ at.J_inverse @ bag.H.mT
    # mu_-b = mu - H (J - H'A H)^-1 H'gamma = mu - (I - G A)^-1 G gamma
    plain = (G @ bent.gamma[..., None])[..., 0]
    return mu - shortened(solve(_eye(G) - bent.times(G), plain), plain)


def shortened(step: Float[Tensor, "b p"], plain: Float[Tensor, "b p"]) -> Float[Tensor, "b p"]:
    """No step longer than LONGEST times the one that ignores the bag's own curvature.

    Without bag b the bound may be all but flat in some direction at w; Newton would go to nowhere.
    """
    most = LONGEST * plain.norm(dim=-1, keepdim=True)
    length = step.norm(dim=-1, keepdim=True)
    shrunk = step * (most / length.clamp(min=1e-300)).clamp(max=1.0)
    return torch.where(length > most, shrunk, step)


def diagonal_slope(
    bag: Bag, mu: Float[Tensor, "b p"], G: Float[Tensor, "b p k"]
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p k"]]:
    """E and D G, D = dE/dmu, of independent patches."""
    E, _, D = patches(bag).jacobian(mu[bag.mask])
    E, slope, left, right = (spread(bag, x) for x in (E, D.diagonal, D.left, D.right))
    return E, slope[..., None] * G + left @ (right.mT @ G)


def mean_fixed_point(bag: Bag, at: Optimum, coupled: bool) -> Float[Tensor, "b p"]:
    """mu_b at the paper's fixed point without bag b: J = R - W'D H."""
    mu = at.c + bag.H @ at.w
    unsmoothed = bag.W @ at.J_inverse @ bag.W.mT
    G = bag.given_f @ unsmoothed  # H J^-1 W'
    if coupled:
        E, DG = cut_slope(mu, bag.sigma, bag.positive, bag.mask, unsmoothed, float(bag.effect))
    else:
        E, DG = diagonal_slope(bag, mu, G)
    pulled = torch.where(bag.mask, mu - E, 0.0)
    # mu_-b = mu + G (I - (I - D) G)^-1 (mu - E)
    step = G @ solve(_eye(G) - G + DG, pulled)[..., None]
    return mu + shortened(step[..., 0], (G @ pulled[..., None])[..., 0])


def covariance(bag: Bag, at: Optimum) -> Float[Tensor, "b p p"]:
    """S_-b, the covariance of m_b under q(u) without bag b."""
    G = bag.H @ at.R_inverse @ bag.H.mT
    # H (R - H'S^-1 H)^-1 H' = G + G (S - G)^-1 G,  S = Sigma + tau^2 11'
    return covariance_from(bag, G + G @ solve(bag.given_f - G, G))


def covariance_from(bag: Bag, back: Float[Tensor, "b p p"]) -> Float[Tensor, "b p p"]:
    """S = Sigma + Sigma (K - W W') Sigma + `back`, which is H R^-1 H' of the fit in question."""
    S = bag.sigma + bag.sigma @ bag.K @ bag.sigma - bag.H @ bag.H.mT + back
    return (S + S.mT) / 2


Mean = Callable[[Bag, Optimum], Float[Tensor, "b p"]]  # mu_b of every bag without it


def scores_without(bag: Bag, at: Optimum, mean: Mean) -> Float[Tensor, " b"]:
    """log p(y_b) of every bag under the fit without it."""
    return scores(bag, mean(bag, at), covariance(bag, at))


def scores(bag: Bag, mu: Float[Tensor, "b p"], S: Float[Tensor, "b p p"]) -> Float[Tensor, " b"]:
    """log p(y_b) by the orthant engine."""
    found = orthant.log_orthant(mu, S, bag.mask, effect=float(bag.effect))
    return torch.where(bag.positive, found.log_1mp, found.log_p)


def smooth_scores(
    bag: Bag, mu: Float[Tensor, "b p"], S: Float[Tensor, "b p p"]
) -> Float[Tensor, " b"]:
    """log p(y_b) by plain EP, which can be differentiated; no correction, no sampling."""
    log_p = orthant.log_orthant_ep(mu, S, bag.mask)
    return torch.where(bag.positive, log_not(log_p), log_p)


def solve(A: Float[Tensor, "b p p"], x: Float[Tensor, "b p *k"]) -> Float[Tensor, "b p *k"]:
    """A^-1 x of every bag.

    Bag after bag on a CPU: with several threads oneMKL does not come back from LU factorisations
    of two or more matrices of some 180 rows ("Parameter 6 was incorrect on entry to DLASWP").
    """
    if A.is_cuda:
        return torch.linalg.solve(A, x)
    return torch.stack([torch.linalg.solve(one, right) for one, right in zip(A, x, strict=True)])


def _eye(like: Float[Tensor, "b p p"]) -> Float[Tensor, "p p"]:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
