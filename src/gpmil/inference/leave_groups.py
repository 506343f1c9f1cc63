"""The bags of a group (a patient) left out together, from a single fit.

Slides of one patient help to predict each other: leaving out one of them says little of patients
not seen. A patient may have any number of bags and patches, so what leave_out.py does in a bag's
own rows is done here in the M weights. With n_b and N_b what bag b adds to the condition for w
and to its Jacobian J, one Newton step of the problem without group g ends at

    w_-g = w - (J - sum_b N_b)^-1 sum_b n_b,    R_-g = R - sum_b W_b'H_b    over b in g,

    n_b = H'gamma,     N_b = H'A H          at the maximum of the bound,
    n_b = W'(E - mu),  N_b = W'(I - D)H     at the paper's fixed point,

and bag b of g is predicted with mu_b = c + H w_-g and R_-g in S_b. First come the sums of some
groups (a `Parcel`: memory stays bounded), then the scores of their bags. The step is short where a
group says much that no other bag says: a solver can go on from where it ends (leave_patients.py).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gpmil.inference import leave_out
from gpmil.inference.leave_out import Bag, Mean, Optimum, Score
from gpmil.moments.coupled import cut_slope

# A step that promises the bound less than half of this ends near enough: log likelihoods of bags
# were off by .001 on average and .005 at most, above 1 by .09 to 1.7 and 8.5 (20 and 50 patients
# with three simulated slides each).
SMALL = 0.1
ELEMENTS = 2**21  # numbers in M x M matrices of groups (or of bags) held at once: 16 MB each
KEPT = 2**23  # numbers of bags that are kept between sums and scores, else made twice: 64 MB


class Parcel(NamedTuple):
    """Some bags: each left out alone, or whole groups of them (numbered 0, 1, ...)."""

    bags: Int[np.ndarray, " k"]
    group: Int[np.ndarray, " k"] | None = None

    @property
    def n_groups(self) -> int:
        """How many groups they are."""
        return 0 if self.group is None else 1 + int(self.group.max())


def at_once(M: int) -> int:
    """How many M x M matrices are held at a time."""
    return max(1, ELEMENTS // M**2)


def parcels(groups: Shaped[np.ndarray, " B"] | None, n_bags: int, M: int) -> list[Parcel]:
    """The bags that are left out alone, then the others, some groups at a time.

    >>> [p.bags.tolist() for p in parcels(np.array([4, 7, 4, 2, 7]), 5, M=1024)]
    [[3], [0, 1, 2, 4]]
    """
    every = np.arange(n_bags)
    if groups is None:
        return [Parcel(every)]
    _, code, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    shared = np.flatnonzero(sizes > 1)
    found = [Parcel(every[sizes[code] == 1])]
    for start in range(0, len(shared), at_once(M)):
        chosen = shared[start : start + at_once(M)]
        bags = every[np.isin(code, chosen)]
        found.append(Parcel(bags, np.searchsorted(chosen, code[bags])))
    return found


class Shares(NamedTuple):
    """What bags or groups add to the condition for w, to its Jacobian, and to R."""

    n: Float[Tensor, "g M"]
    N: Float[Tensor, "g M M"]
    gram: Float[Tensor, "g M M"]  # W'H


# chosen bags in batches, with their numbers
Padded = Callable[[Int[np.ndarray, " k"]], Iterable[tuple[Int[np.ndarray, " b"], Bag]]]
Share = Callable[[Bag, Optimum], Shares]  # of every bag
# the optimum without chosen bags, from a w near it and what they add to J
Settle = Callable[
    [Int[np.ndarray, " k"], Float[Tensor, " M"], Float[Tensor, "M M"]], Float[Tensor, " M"]
]


def share_of_bound(bag: Bag, at: Optimum) -> Shares:
    """H'gamma, H'A H and W'H of every bag."""
    bent = leave_out.curvature(bag, at.c + bag.H @ at.w)
    n = (bag.H.mT @ bent.gamma[..., None])[..., 0]
    return Shares(n, bent.times(bag.H.mT) @ bag.H, bag.W.mT @ bag.H)


def share_of_fixed_point(bag: Bag, at: Optimum, coupled: bool) -> Shares:
    """W'(E - mu), W'(I - D)H and W'H of every bag."""
    mu = at.c + bag.H @ at.w
    if coupled:
        cut = (bag.sigma, bag.positive, bag.mask, bag.W, float(bag.effect), bag.known)
        E, DH = cut_slope(mu, *cut)
    else:
        E, DH = leave_out.diagonal_slope(bag, mu, bag.H)
    n = bag.W.mT @ torch.where(bag.mask, E - mu, 0.0)[..., None]
    gram = bag.W.mT @ bag.H
    return Shares(n[..., 0], gram - bag.W.mT @ DH, gram)


def summed(count: int, found: Iterable[tuple[Int[Tensor, " b"], Shares]]) -> Shares:
    """The sums of each of `count` groups, from batches of bags with the numbers of their groups."""
    total: Shares | None = None
    for group, shares in found:
        if total is None:
            total = Shares(*(x.new_zeros(count, *x.shape[1:]) for x in shares))
        for sums, x in zip(total, shares):
            sums.index_add_(0, group, x)
    assert total is not None
    return total


class Without(NamedTuple):
    """w and R^-1 of the fit without each group."""

    w: Float[Tensor, "g M"]
    R_inverse: Float[Tensor, "g M M"]


def without(total: Shares, at: Optimum) -> Without:
    """The groups taken out of the fit."""
    eye = torch.eye(len(at.w), dtype=at.w.dtype, device=at.w.device)
    # w_-g = w - (J - N)^-1 n = w - (I - J^-1 N)^-1 J^-1 n
    plain = total.n @ at.J_inverse.mT
    step = leave_out.solve(eye - at.J_inverse @ total.N, plain)
    # R_-g^-1 = (R - W'H)^-1 = (I - R^-1 W'H)^-1 R^-1
    left = eye - at.R_inverse @ total.gram
    R_inverse = leave_out.solve(left, at.R_inverse.expand_as(left))
    return Without(at.w - leave_out.shortened(step, plain), R_inverse)


def decrement(total: Shares, at: Optimum, left: Without) -> Float[Tensor, " g"]:
    """n'(J - N)^-1 n, twice the rise that the step promises the bound without the group."""
    return (total.n * (at.w - left.w)).sum(-1)


def predicted(
    bag: Bag, group: Int[Tensor, " b"], c: float | Tensor, left: Without
) -> tuple[Float[Tensor, "b p"], Float[Tensor, "b p p"]]:
    """mu and S of every bag without its group."""
    mu = c + (bag.H @ left.w[group][..., None])[..., 0]
    return mu, leave_out.covariance_from(bag, bag.H @ left.R_inverse[group] @ bag.H.mT)


def scores_without(
    padded: Padded,
    groups: Shaped[np.ndarray, " B"],
    at: Optimum,
    mean: Mean,
    share: Share,
    settle: Settle | None = None,
    score: Score = leave_out.scores,
) -> Float[Tensor, " B"]:
    """log p(y_b) of every bag under the fit without its group.

    `settle` goes on from where one step ends, for groups that are not `SMALL`.
    """
    out = torch.full((len(groups),), torch.nan, dtype=torch.float64)
    for parcel in parcels(groups, len(groups), len(at.w)):
        if parcel.group is None:
            for numbers, bag in padded(parcel.bags):
                out[numbers] = leave_out.scores_without(bag, at, mean, score).cpu()
            continue
        first, kept = _keeping(_batches(parcel, padded))
        of_bags = ((group, share(bag, at)) for _, group, bag in first)
        total = summed(parcel.n_groups, of_bags)
        left = without(total, at)
        if settle is not None:
            left = settled(parcel, decrement(total, at, left), left, total.N, settle)
        for numbers, group, bag in kept() or _batches(parcel, padded):
            out[numbers] = score(bag, *predicted(bag, group, at.c, left)).cpu()
    return out


def settled(
    parcel: Parcel,
    promised: Float[Tensor, " g"],
    left: Without,
    N: Float[Tensor, "g M M"],
    settle: Settle,
) -> Without:
    """The same with w at the optimum without the group, for groups that are not `SMALL`."""
    assert parcel.group is not None
    w = left.w.clone()
    for g in np.flatnonzero((promised.abs() > SMALL).cpu().numpy()):
        w[g] = settle(parcel.bags[parcel.group == g], left.w[g], N[g])
    return left._replace(w=w)


_Batch = tuple[np.ndarray, Tensor, Bag]


def _batches(parcel: Parcel, padded: Padded) -> Iterator[_Batch]:
    """The bags of some groups with their numbers and those of their groups, not too many."""
    assert parcel.group is not None
    for numbers, bag in padded(parcel.bags):
        group = parcel.group[np.searchsorted(parcel.bags, numbers)]
        most = at_once(bag.H.shape[-1])
        for start in range(0, len(numbers), most):
            some = slice(start, start + most)
            known = None if bag.known is None else bag.known[some]
            part = Bag._make([*(x[some] for x in bag[:6]), bag.effect, known])
            yield numbers[some], torch.from_numpy(group[some]).to(bag.H.device), part


def _keeping(batches: Iterator[_Batch]) -> tuple[Iterator[_Batch], Callable[[], list[_Batch]]]:
    """The batches, and behind the last of them all of these again; none if they are too large."""
    held: list[_Batch] = []
    left = KEPT

    def first() -> Iterator[_Batch]:
        nonlocal left
        for batch in batches:
            left -= sum(x.numel() for x in batch[2][2:6])
            if left > 0:
                held.append(batch)
            yield batch

    return first(), lambda: held if left > 0 else []


def standard_error(
    values: Float[np.ndarray, " B"], groups: Shaped[np.ndarray, " B"] | None = None
) -> float:
    """Of the mean of the values of bags, where those of one group may go together.

    >>> x = np.array([1.0, 2.0, 4.0, 7.0])
    >>> round(standard_error(x), 4), round(standard_error(np.repeat(x, 2), np.arange(8) // 2), 4)
    (1.3229, 1.3229)
    """
    own = np.arange(len(values)) if groups is None else np.unique(groups, return_inverse=True)[1]
    # sum over groups of (sum over their bags of x - mean)^2, G / (G - 1), over B^2
    sums = np.bincount(own, values - values.mean())
    count = len(sums)
    if count < 2:
        return float("inf")
    return float(np.sqrt(count / (count - 1) * (sums**2).sum()) / len(values))
