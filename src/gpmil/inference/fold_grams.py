"""R without each fold, I + sum W'H over the bags of the others, and the way back through it.

What a fold adds is computed once; R_k is what all folds add less what fold k does.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.fast import products
from gpmil.inference.at_settings import Features, Theta
from gpmil.inference.folded_cohort import Cohort, Fold
from gpmil.moments.likelihood import downdate, has_effect


def precisions(cohort: Cohort, theta: Theta, made: Features) -> Float[Tensor, "k M M"]:
    """R_k = I + sum W'H over the bags of all folds but k."""
    tau = float(theta.slide_effect)
    W = cohort.by_fold(made.W)
    H = W if made.H is made.W else cohort.by_fold(made.H)
    gram = torch.stack([gram_of(*own, tau) for own in zip(W, H, cohort.folds, strict=True)])
    R = torch.eye(gram.shape[-1]).to(gram) + gram.sum(0) - gram
    return (R + R.mT) / 2


def gram_of(
    W: Float[Tensor, "n M"], H: Float[Tensor, "n M"], fold: Fold, tau: float | Tensor
) -> Float[Tensor, "M M"]:
    """sum_b W_b'H_b - k_b (W_b'1)(W_b'1)', k = tau^2 / (1 + tau^2 n): what bags add to R."""
    gram = products.half_gram(W, H)
    return gram + _less_shared(W, fold, tau) if has_effect(tau) else gram


def _less_shared(W: Float[Tensor, "n M"], fold: Fold, tau: float | Tensor) -> Float[Tensor, "M M"]:
    """-sum_b k_b (W_b'1)(W_b'1)'."""
    sums, share = totals(W, fold.offsets), downdate(tau, fold.offsets.diff())
    return -sums.mT @ (share[:, None] * sums)


def totals(x: Float[Tensor, "n k"], offsets: Tensor) -> Float[Tensor, "b k"]:
    """Sums over the bags."""
    return torch.segment_reduce(x, "sum", offsets=offsets, axis=0)


def through(cohort: Cohort, theta: Theta, held: Features, R_bar: Float[Tensor, "k M M"]) -> None:
    """<R', W'Sigma W> of every fold, R' symmetric: W' = 2 Sigma W R' = 2 H R', Sigma at hand.

    And lambda' = -<W R', (Sigma - Sigma^2) W> / lambda = -<H R', W - H> / lambda.
    """
    with torch.no_grad():
        own = zip(cohort.by_fold(held.H.detach()), R_bar, strict=True)
        HR = torch.cat([products.matmul(H, R) for H, R in own])
        by_strength = torch.zeros_like(held.noise[0])
        if isinstance(theta.coupling, Tensor):
            by_strength = torch.vdot(HR.flatten(), (held.H - held.W).flatten()) / theta.coupling
        by_W = HR.mul_(2)
    if isinstance(theta.coupling, Tensor):
        torch.autograd.backward([theta.coupling], [by_strength])
    if has_effect(theta.slide_effect):
        _through_shared(cohort, theta.slide_effect, held.W, R_bar, by_W)
    torch.autograd.backward([held.W], [by_W])


def _through_shared(
    cohort: Cohort,
    tau: float | Tensor,
    W: Float[Tensor, "N M"],
    R_bar: Float[Tensor, "k M M"],
    by_W: Float[Tensor, "N M"],
) -> None:
    """<R', -sum_b k_b s_b s_b'> with s_b = W_b'1: k_b' = -s_b'R's_b, s_b' = -2 k_b R's_b."""
    with torch.no_grad():
        own = zip(cohort.by_fold(W), cohort.by_fold(by_W), cohort.folds, R_bar, strict=True)
        forms = []
        for rows, by_rows, fold, R in own:
            sizes, sums = fold.offsets.diff(), totals(rows, fold.offsets)
            pulled = sums @ R
            forms.append(-torch.linalg.vecdot(sums, pulled))
            by_sums = (-2 * downdate(tau, sizes))[:, None] * pulled
            by_rows += by_sums.repeat_interleave(sizes, 0)
    if isinstance(tau, Tensor):
        sizes = torch.cat([fold.offsets.diff() for fold in cohort.folds])
        torch.vdot(downdate(tau, sizes).to(W), torch.cat(forms)).backward()
