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
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.coupling.operator import Dense
from gpmil.fast import compiled, products
from gpmil.moments import orthant, smooth_orthant, taught
from gpmil.moments.coupled import cut_slope
from gpmil.moments.independent import IndependentPatches
from gpmil.moments.likelihood import Group, downdate, has_effect
from gpmil.moments.taught import TaughtPatches
from gpmil.moments.truncated import log_not
from gpmil.moments.with_effect import PatchesWithEffect
from gpmil.process.sparse_gp import SparseGP

# Times the step that ignores the bag's own curvature: beyond it Newton has lost its way.
LONGEST = 10.0
LEAST = -1e-8  # log P_all - log P_L, two runs of EP: never above


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
    H, K = W if _alone(part.sigma) else part.sigma @ W, gp.within(padded, padded)
    return Bag(
        part.mask, positive, less_shared(W, part.mask, gp.effect), H, part.sigma, K, gp.effect
    )


def _alone(sigma: Float[Tensor, "b p p"]) -> bool:
    """Whether Sigma is the identity: a neighbour makes its diagonal less than one."""
    return bool((sigma.diagonal(dim1=-2, dim2=-1) == 1).all())


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


def group_of(bag: Bag) -> Group:
    """The instances as a likelihood is told of them, one bag after the other."""
    deviation, offsets = flat(bag, bag.sigma.diagonal(dim1=-2, dim2=-1).sqrt())
    rows = slice(0, len(deviation))
    known = None if bag.known is None else bag.known[bag.mask]
    return Group(deviation, offsets, bag.positive, None, rows, effect=bag.effect, known=known)


def patches(bag: Bag) -> IndependentPatches | PatchesWithEffect | TaughtPatches:
    """The likelihood of the instances, one bag after the other."""
    return taught.patches(group_of(bag))


def curvature(bag: Bag, mu: Float[Tensor, "b p"]) -> Curvature:
    """The first two derivatives of log Z of independent patches."""
    gamma, _, A = patches(bag).curvature(mu[bag.mask])
    return Curvature(*(spread(bag, x) for x in (gamma, A.diagonal, A.left, A.right)))


def mean_direct(bag: Bag, at: Optimum) -> Float[Tensor, "b p"]:
    """mu_b at the maximum of the bound without bag b: J is the Hessian of minus the bound."""
    mu = at.c + bag.H @ at.w
    return mu - taken_out(bag, at, curvature(bag, mu))


def taken_out(bag: Bag, at: Optimum, bent: Curvature) -> Float[Tensor, "b p"]:
    """What mu_b loses with bag b, by one Newton step."""
    G = forms(bag, at.J_inverse)
    # mu_-b = mu - H (J - H'A H)^-1 H'gamma = mu - (I - G A)^-1 G gamma
    plain = (G @ bent.gamma[..., None])[..., 0]
    return shortened(solve(_eye(G) - bent.times(G), plain), plain)


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
        cut = (bag.sigma, bag.positive, bag.mask, unsmoothed, float(bag.effect), bag.known)
        E, DG = cut_slope(mu, *cut)
    else:
        E, DG = diagonal_slope(bag, mu, G)
    pulled = torch.where(bag.mask, mu - E, 0.0)
    # mu_-b = mu + G (I - (I - D) G)^-1 (mu - E)
    step = G @ solve(_eye(G) - G + DG, pulled)[..., None]
    return mu + shortened(step[..., 0], (G @ pulled[..., None])[..., 0])


def covariance(bag: Bag, at: Optimum) -> Float[Tensor, "b p p"]:
    """S_-b, the covariance of m_b under q(u) without bag b."""
    # H (R - H'S^-1 H)^-1 H' = G + G (S - G)^-1 G,  S = Sigma + tau^2 11'
    found = _covariance_by_tiles(bag, at.R_inverse)
    if found is not None:
        return found
    G = bag.H @ at.R_inverse @ bag.H.mT
    root = torch.linalg.solve_triangular(torch.linalg.cholesky(bag.given_f - G), G, upper=False)
    return covariance_from(bag, torch.baddbmm(G, root.mT, root))


def covariance_from(bag: Bag, back: Float[Tensor, "b p p"]) -> Float[Tensor, "b p p"]:
    """S = Sigma + Sigma (K - W W') Sigma + `back`, which is H R^-1 H' of the fit in question."""
    S = torch.baddbmm(_unexplained(bag) + back, bag.H, bag.H.mT, alpha=-1)
    return (S + S.mT) / 2


def _unexplained(bag: Bag) -> Float[Tensor, "b p p"]:
    """Sigma + Sigma K Sigma."""
    return bag.sigma + (bag.K if _alone(bag.sigma) else bag.sigma @ bag.K @ bag.sigma)


# --- By tiles, where they are compiled ------------------------------------------------------------


def forms(bag: Bag, Q: Float[Tensor, "M M"]) -> Float[Tensor, "b p p"]:
    """H Q H' of every bag, Q symmetric."""
    ready = _tiles(bag, Q)
    if ready is None:
        return bag.H @ Q @ bag.H.mT
    loops, halves = ready
    out = torch.zeros_like(bag.sigma)
    for X, G in zip(halves, out.numpy(), strict=True):
        loops.outer(X, G)
    return out


def _covariance_by_tiles(bag: Bag, R_inverse: Float[Tensor, "M M"]) -> Tensor | None:
    """As `covariance`; None where it is left to torch."""
    ready = _tiles(bag, R_inverse)
    if ready is None:
        return None
    loops, halves = ready
    S = _unexplained(bag)
    S = (S + S.mT) / 2
    for X, given_f, H, out in zip(halves, bag.given_f.numpy(), bag.H.numpy(), S.numpy()):
        loops.covariance(X, given_f, H[: len(X)], out)
    return S if bool(torch.isfinite(S).all()) else None  # torch says what is wrong


def _tiles(bag: Bag, Q: Float[Tensor, "M M"]) -> tuple[Any, list[np.ndarray]] | None:
    """The loops, and X with X X' = H Q H' of every bag without its padding; None on a GPU."""
    loops = None if bag.H.is_cuda or bag.H.requires_grad else compiled.less_bag()
    if loops is None:
        return None
    root, failed = torch.linalg.cholesky_ex(Q)
    if failed:
        return None
    X = products.matmul(bag.H.flatten(0, 1), root, triangle=-1).view_as(bag.H).numpy()
    return loops, [rows[:n] for rows, n in zip(X, bag.mask.sum(-1).tolist(), strict=True)]


Mean = Callable[[Bag, Optimum], Float[Tensor, "b p"]]  # mu_b of every bag without it
Score = Callable[[Bag, Float[Tensor, "b p"], Float[Tensor, "b p p"]], Tensor]  # m_b ~ N(mu, S)


# --- What is known of a bag, under the fit without it ---------------------------------------------


def scores(bag: Bag, mu: Float[Tensor, "b p"], S: Float[Tensor, "b p p"]) -> Float[Tensor, " b"]:
    """log p(y_b), or of y_b and the known labels of patches, by the orthant engine."""
    found = orthant.log_orthant(mu, S, bag.mask, effect=float(bag.effect))
    label = torch.where(bag.positive, found.log_1mp, found.log_p)
    return _with_told(bag, mu, S, label, found.log_p)[0]


def label_scores(
    bag: Bag, mu: Float[Tensor, "b p"], S: Float[Tensor, "b p p"]
) -> Float[Tensor, " b"]:
    """log p(y_b | known labels of its patches): 0 where one of them is positive."""
    found = orthant.log_orthant(mu, S, bag.mask, effect=float(bag.effect))
    label = torch.where(bag.positive, found.log_1mp, found.log_p)
    both, told = _with_told(bag, mu, S, label, found.log_p)
    return both - told


def smooth_scores(
    bag: Bag, mu: Float[Tensor, "b p"], S: Float[Tensor, "b p p"]
) -> Float[Tensor, " b"]:
    """As `scores` by plain EP; no correction, no sampling."""
    log_p = smooth_orthant.log_orthant_ep(mu, S, bag.mask, bag.effect)
    return _with_told(bag, mu, S, torch.where(bag.positive, log_not(log_p), log_p), log_p)[0]


def patch_scores(
    bag: Bag, mu: Float[Tensor, "b p"], S: Float[Tensor, "b p p"]
) -> Float[Tensor, "b p"]:
    """log p(label of a patch | the bag's label and its other patches'); nan where unknown."""
    known = torch.full_like(bag.mask, -1, dtype=torch.long) if bag.known is None else bag.known
    out = torch.where(known >= 0, 0.0, torch.nan).to(mu)  # a negative bag says it itself
    whole = smooth_scores(bag, mu, S)
    told = (known >= 0) & bag.positive[:, None]
    for i in told.any(0).nonzero()[:, 0].tolist():
        here = told[:, i]
        less = known[here].clone()
        less[:, i] = -1
        some = [x[here] for x in bag[:6]]
        without = smooth_scores(Bag._make([*some, bag.effect, less]), mu[here], S[here])
        out[here, i] = (whole[here] - without).clamp(max=0.0)
    return out


def _with_told(
    bag: Bag, mu: Tensor, S: Tensor, label: Float[Tensor, " b"], log_q: Float[Tensor, " b"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """log p(y_b, known labels of patches), and of these labels alone.

    With a positive one the bag's label is known: P(m_i has its side, i known). Else P_L - P_all,
    the chances that the known ones and that all of them lie below zero; `log_q` is log P_all.
    """
    told = torch.zeros_like(label)
    if bag.known is None:
        return label, told
    teaches = (bag.known >= 0).any(-1) & bag.positive
    if not bool(teaches.any()):
        return label, told
    known, at = bag.known[teaches], teaches.nonzero()[:, 0]
    side = torch.where(known == 1, -1.0, 1.0).to(mu)
    mu, S = side * mu[teaches], side[:, :, None] * S[teaches] * side[:, None, :]
    log_l, above = torch.zeros_like(mu[:, 0]), (known == 1).any(-1)
    # patches of both sides do not share an effect of one sign: EP on the whole covariance
    for some, effect in ((above, 0.0), (~above, bag.effect)):
        if bool(some.any()):
            found = smooth_orthant.log_orthant_ep(mu[some], S[some], known[some] >= 0, effect)
            log_l = log_l.index_copy(0, some.nonzero()[:, 0], found)
    rest = log_not((log_q[teaches] - log_l).clamp(max=LEAST))
    both = log_l + torch.where(above, 0.0, rest)
    return label.index_copy(0, at, both), told.index_copy(0, at, log_l)


def scores_without(bag: Bag, at: Optimum, mean: Mean, score: Score = scores) -> Tensor:
    """What is known of every bag under the fit without it."""
    return score(bag, mean(bag, at), covariance(bag, at))


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
