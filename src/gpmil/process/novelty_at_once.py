"""Novelty where a GPU has all that it looks at: every patient is judged at once.

novelty.py goes from patient to patient, by LAPACK. Here the rows V of all patients stand side by
side, filled up with rows of zeros, which change neither V'V nor any sum. As in others.py,

    R = diag(1 + s) - V'V,    n (C + r I) = diag(s + n r) - V'V - n m m',

and x'(diag(b) - U'U)^-1 x = |y|^2 + |L^-1 U y|^2 with y = diag(b)^-1/2 x, U likewise scaled and
L L' = I - U U' (Woodbury's formula).
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.process.novelty import LEVELS, Looked, Seen, bag_mean, surprise
from gpmil.process.others import EPS, RIDGE, TINY, sums

MOST = 2**26  # numbers in the largest array: slides times slides times points


class Patients(NamedTuple):
    """The rows of patients side by side, and where their slides are."""

    rows: Int[Tensor, "P l"]  # of W; the first one again where a patient has fewer
    there: Float[Tensor, "P l 1"]  # 0 there
    slides: Int[Tensor, " S"]  # the patient of every slide
    bag: Int[Tensor, " n"]  # the slide of every row
    place: Int[Tensor, " n"]  # of every row within its patient

    @classmethod
    def of(
        cls, bag: Int[np.ndarray, " n"], patient: Int[np.ndarray, " S"], device: torch.device
    ) -> "Patients":
        """From the slide of every row, and the patient of every slide."""
        of = patient[bag]
        order = np.argsort(of, kind="stable")
        counts = np.bincount(of)
        starts = np.cumsum(counts) - counts
        place = np.empty(len(of), dtype=np.int64)
        place[order] = np.arange(len(of)) - starts[of[order]]
        rows = np.zeros((len(counts), counts.max()), dtype=np.int64)
        rows[of, place] = np.arange(len(of))
        there = np.arange(counts.max()) < counts[:, None]
        made = (rows, there[:, :, None].astype(float), patient, bag, place)
        return cls(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in made))


class Inverse(NamedTuple):
    """(diag(b) - U'U)^-1 of every patient: scaled U, and L."""

    scale: Float[Tensor, "P M"]  # b^-1/2
    U: Float[Tensor, "P l M"]
    L: Float[Tensor, "P l l"]

    @classmethod
    def of(cls, b: Float[Tensor, "P M"], U: Float[Tensor, "P l M"]) -> "Inverse":
        """From b and U."""
        scale = b.rsqrt()
        U = U * scale[:, None]
        eye = torch.eye(U.shape[1], dtype=U.dtype, device=U.device)
        return cls(scale, U, torch.linalg.cholesky(eye - U @ U.mT))

    def power(self, X: Float[Tensor, "P k M"]) -> Float[Tensor, "P k"]:
        """x'(diag(b) - U'U)^-1 x of every row."""
        y, z = self.roots(X)
        return y.square().sum(2) + z.square().sum(2)

    def roots(
        self, X: Float[Tensor, "P k M"]
    ) -> tuple[Float[Tensor, "P k M"], Float[Tensor, "P k l"]]:
        """y and L^-1 U y of every row."""
        y = X * self.scale[:, None]
        return y, torch.linalg.solve_triangular(self.L, self.U @ y.mT, upper=False).mT


def serves(looked: Looked, patient: Int[np.ndarray, " S"]) -> bool:
    """On a GPU, where patients have few rows and the arrays are not too large."""
    if not looked.W.is_cuda or not len(looked.bag):
        return False
    M, slides = looked.W.shape[1], len(patient)  # a patient has one slide at least
    return np.bincount(patient[looked.bag]).max() < M and slides * slides * M <= MOST


def learned(looked: Looked, patient: Int[np.ndarray, " S"]) -> Seen:
    """What `Seen.learn` keeps, from all slides; `patient` counts from 0 without a gap."""
    W, own, bag = looked.W, looked.own, looked.bag
    every, of = sums(W), Patients.of(bag, patient, W.device)
    s, Q = torch.linalg.eigh(every.second)
    s, V, phi = s.clamp(min=0.0), W @ Q, bag_mean(W, bag)
    middles, mean = phi @ Q, every.first @ Q / every.n
    spreads = _spreads(every.n, mean, s, V, middles, of)
    U = V[of.rows] * of.there
    e = _explained(s, U)[of.slides[of.bag], of.place] / own
    d = _nearest(every.n, mean, s, U, middles, spreads, of)
    each = _mean(e, of).cpu().numpy()
    scores = np.stack([d.cpu().numpy(), surprise(each)], axis=1).clip(TINY)
    quantiles = np.quantile(surprise(e.cpu().numpy()), LEVELS)
    n = np.array([every.n])
    return Seen(every.precision(), every.first / every.n, phi, spreads, quantiles, scores, n)


def _explained(s: Float[Tensor, " M"], U: Float[Tensor, "P l M"]) -> Float[Tensor, "P l"]:
    """w'(I - R^-1) w of every row, without its patient."""
    b = (1 + s).expand(len(U), -1)
    return U.square().sum(2) - Inverse.of(b, U).power(U)


def _ridges(power: Float[Tensor, " P"], mean: Float[Tensor, "P M"]) -> Float[Tensor, "P 1"]:
    """r, from the mean of |w|^2 and that of w."""
    variance = (power - mean.square().sum(1)).clamp(min=0.0) / mean.shape[1]
    return (RIDGE * variance + EPS * power / mean.shape[1] + TINY)[:, None]


def _mean(values: Float[Tensor, " n"], of: Patients) -> Float[Tensor, " S"]:
    """Of the rows of every slide."""
    total = values.new_zeros(len(of.slides)).index_add_(0, of.bag, values)
    return total / torch.bincount(of.bag, minlength=len(of.slides))


def _spreads(
    n: float, mean: Float[Tensor, " M"], s: Float[Tensor, " M"], V: Float[Tensor, "n M"],
    middles: Float[Tensor, "S M"], of: Patients,
) -> Float[Tensor, " S"]:  # fmt: skip
    """v of every slide in the metric of all patches: mean |y|^2 - |mean y|^2."""
    b = s + n * _ridges((s.sum() / n)[None], mean[None])
    metric = Inverse.of(b, n**0.5 * mean[None, None])
    around = _mean(metric.power(V[None])[0], of) - metric.power(middles[None])[0]
    return n * around.clamp(min=0.0)


def _nearest(
    n: float, mean: Float[Tensor, " M"], s: Float[Tensor, " M"], U: Float[Tensor, "P l M"],
    middles: Float[Tensor, "S M"], spreads: Float[Tensor, " S"], of: Patients,
) -> Float[Tensor, " S"]:  # fmt: skip
    """d_b of every slide from those of other patients, in the metric of the others."""
    rest = n - of.there.sum((1, 2))
    means = (n * mean - U.sum(1)) / rest[:, None]
    power = (s.sum() - U.square().sum((1, 2))) / rest
    b = s + rest[:, None] * _ridges(power, means)
    metric = Inverse.of(b, torch.cat([U, (rest.sqrt()[:, None] * means)[:, None]], 1))
    slides = torch.arange(len(of.slides), device=U.device)
    roots = metric.roots(middles.expand(len(U), -1, -1))
    apart, at = U.new_zeros(len(slides), len(slides)), U.new_zeros(len(slides))
    for y in roots:
        mine = y[of.slides, slides]  # every slide, in the metric of its own patient
        apart += (y[of.slides] - mine[:, None]).square().sum(2)
        at += mine.square().sum(1)
    own = _mean(metric.power(U)[of.slides[of.bag], of.place], of) - at
    rest = rest[of.slides][:, None]
    found = rest * apart / (rest * own.clamp(min=0.0)[:, None] + spreads).clamp(min=EPS)
    same = of.slides[:, None] == of.slides
    return found.masked_fill(same, torch.inf).min(1).values
