"""The logistic likelihood of VGPMIL (Haussmann et al. 2017): Jaakkola's bound and q(h).

    p(h_i | f_i) = sigmoid(f_i)^h_i (1 - sigmoid(f_i))^(1 - h_i)                  eq. (hgf)
    p(y_b | h_b) = H^G_b / (H + 1),  G_b = 1[y_b = max h_b]                       eq. (ygh_vgpmil)

The logistic is bounded below by a Gaussian with one parameter xi_i per instance,

    log sigmoid(f) >= log sigmoid(xi) + (f - xi)/2 - l(xi) (f^2 - xi^2),  l(xi) = tanh(xi/2)/(4 xi),

and q(u) q(h) with q(h_i = 1) = pi_i maximises what remains, one factor after the other:

    R = I + W' theta W,  w = R^-1 W'(pi - 1/2 - theta c),  theta = 2 l(xi)        q(u), whitened
    xi_i^2 = E[f_i^2] = (c + W w)_i^2 + (W R^-1 W')_ii + (Kxx - W W')_ii          FITC's diagonal
    logit pi_i = E[f_i] +- log(H) P(all others negative)                          q(h)

The sign is that of the bag. Log odds s = logit(pi) are kept in place of pi, so that nothing
saturates. What an instance is known by between two passes is its column of a `State`: s and xi.

With a slide effect, f_i + e_b in place of f_i, e_b ~ N(0, tau^2), the bounded likelihood is a
Gaussian of (u, e) still, and q(u, e) q(h) the best of its kind:

    q(e_b | u) = N(a_b - v_b'(L^-1 u - w), 1 / p_b)                               p, v and a by bag
    p_b = tau^-2 + sum_i theta_i,  v_b = W_b'theta_b / p_b

and R loses p_b v_b v_b' for every bag. Given u and e instances are independent as before.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.special import expit, log_ndtr
from torch import Tensor

from gpmil.moments.likelihood import Group, Likelihood, LogZ, Product
from gpmil.moments.truncated import segment_max, segment_sum

ROWS = 8192  # of W in float64 at a time
GPU_ROWS = 2**17  # and on a GPU
HERMITE, WIDE = 96, 1.5  # nodes of the expectation of a sigmoid, up to which deviation
REACH = 6.5  # deviations of an effect that are gone through
EXPECTED_MAX = ("product", "largest")
State = Float[Tensor, "two n"]  # s and xi


# --- q(h) -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Columns:
    """Bags, largest first, and how many of them have a 1st, 2nd, 3rd ... instance.

    Column k holds the k-th instance of every bag that has one: updates that must be made one
    after the other inside a bag run over the columns, for all bags at once.
    """

    first: Int[Tensor, " b"]  # where the bags begin
    reach: list[int]
    sign: Float[Tensor, " b"]  # 1 for positive bags, -1 for negative ones
    order: Int[Tensor, " b"]  # the bags in this order

    @classmethod
    def of(cls, group: Group) -> "Columns":
        """The columns of some whole bags."""
        sizes = group.offsets.diff()
        order = torch.argsort(sizes, descending=True, stable=True)
        falling = -sizes[order].cpu().numpy()
        reach = np.searchsorted(falling, -np.arange(-falling.min(initial=0)), side="left")
        sign = torch.where(group.positive, 1.0, -1.0).double()
        return cls(group.offsets[:-1][order], reach.tolist(), sign[order], order)


def update_labels(
    s: Float[Tensor, " n"], Ef: Float[Tensor, " n"], group: Group, columns: Columns, log_H: float
) -> Float[Tensor, " n"]:
    """q(h), one instance after the other: each step maximises the bound in its own pi_i."""
    own, pull = softplus(s), log_H * columns.sign
    log_none = log_no_label(s, group)[columns.order]
    found = torch.empty_like(s)
    for k, count in enumerate(columns.reach):
        rows = columns.first[:count] + k
        # log prod_{j != i} (1 - pi_j) = E[G_b | h_i = 1] - E[G_b | h_i = 0], but for the sign
        others = log_none[:count] + own[rows]
        found[rows] = Ef[rows] + pull[:count] * others.exp()
        log_none[:count] = others - softplus(found[rows])
    return found


def update_labels_by_largest(
    s: Float[Tensor, " n"], Ef: Float[Tensor, " n"], group: Group, columns: Columns, log_H: float
) -> Float[Tensor, " n"]:
    """q(h) as the original code has it: all at once, E[max of the others] ~ their largest pi."""
    largest = segment_max(s, group.offsets)[group.row]
    # the largest of the others is the second largest, at the first instance that is the largest
    place = torch.arange(len(s), device=s.device)
    at_top = torch.where(s == largest, -place.double(), -torch.inf)
    top = (-segment_max(at_top, group.offsets)).long()
    rest = s.index_fill(0, top, -torch.inf)
    others = largest.index_copy(0, top, segment_max(rest, group.offsets))
    sign = torch.where(group.positive, 1.0, -1.0).double()[group.row]
    # 2 y + m - 2 y m - 1 = +- (1 - m)
    return Ef + sign * log_H * torch.sigmoid(-others)


UPDATES = {"product": update_labels, "largest": update_labels_by_largest}


def log_no_label(s: Float[Tensor, " n"], group: Group) -> Float[Tensor, " b"]:
    """log prod_i (1 - pi_i) of every bag."""
    return -segment_sum(softplus(s), group.offsets)


def softplus(s: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """log(1 + e^s) = -log(1 - sigmoid(s)); beyond 40 it is s to the last digit."""
    return torch.nn.functional.softplus(s, threshold=40)


# --- q(u) -----------------------------------------------------------------------------------------
def curvature(xi: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """theta = 2 l(xi) = tanh(xi/2) / (2 xi), 1/4 at zero."""
    small = xi.abs() < 1e-3
    safe = torch.where(small, 1.0, xi)
    return torch.where(small, 0.25 - xi.square() / 48, torch.tanh(safe / 2) / (2 * safe))


class Process(NamedTuple):
    """q(u), as what its likelihood asks of it."""

    w: Float[Tensor, " M"]
    covariance: Float[Tensor, "M M"]  # R^-1

    def to(self, device: str | torch.device) -> "Process":
        """The same on a device."""
        return Process(self.w.to(device), self.covariance.to(device))

    def variances(self, rows: Float[Tensor, "n M"]) -> Float[Tensor, " n"]:
        """diag(V R^-1 V') of the rows of V."""
        return ((rows @ self.covariance) * rows).sum(1)


class Shared(NamedTuple):
    """What the instances of a bag say of its effect, at given q(h) and xi."""

    lean: Float[Tensor, "b M"]  # W_b'theta_b = p_b v_b
    precision: Float[Tensor, " b"]  # p_b
    pulled: Float[Tensor, " b"]  # sum_i (pi_i - 1/2 - theta_i c)

    def mean(self, w: Float[Tensor, " M"]) -> Float[Tensor, " b"]:
        """a_b, at u = L w."""
        return (self.pulled - self.lean @ w) / self.precision

    def divergence(self, at: Process, tau: float) -> Float[Tensor, ""]:
        """E_u KL(q(e | u) | p(e)), summed over the bags."""
        p = self.precision
        square = self.mean(at.w).square() + at.variances(self.lean / p[:, None]) + 1 / p
        return (square / tau**2 - 1 + (tau**2 * p).log()).sum() / 2


@dataclass(frozen=True)
class Logistic:
    """The likelihood of bags, by their group: how firmly they follow, E[max], and tau."""

    log_H: float
    expected_max: str = "product"
    effect: float = 0.0

    def __call__(self, group: Group) -> "LogisticPatches":
        """That of some bags."""
        return LogisticPatches(group, self)


class LogisticPatches(Likelihood):
    """q(h) and xi of some whole bags, whose H is W: no coupling. Their state is the solver's."""

    def __init__(self, group: Group, rule: Logistic):
        self.group, self.rule = group, rule
        self.columns = Columns.of(group)

    def curvature(self, mu: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], LogZ, Product]:
        """There is no log Z: f_i is integrated out under the bound."""
        raise ValueError("a logistic likelihood is fitted by gpmil.VGPMIL's own sweeps alone.")

    def turn(
        self, W: Float[Tensor, "n M"], state: State, at: Process | None, c: float
    ) -> tuple[Tensor, Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """xi and q(h) at the best for q(u), written over `state`, and what follows from them.

        Their part of the bound, and their sums W'(pi - 1/2 - theta c) and W'theta W for the next
        q(u). Without `at` the sums of the state as it is.
        """
        bound = state.new_zeros(())
        if at is not None:
            shared = self._shared(W, state, c) if self.rule.effect else None
            Ef, Eff = self.moments(W, at, shared, c)
            update = UPDATES[self.rule.expected_max]
            state[0] = update(state[0], Ef, self.group, self.columns, self.rule.log_H)
            state[1] = Eff.sqrt()
            bound = self.share(state, Ef)
            if shared is not None:
                bound = bound - shared.divergence(at, self.rule.effect)
        return bound, *self.sums(W, state, c)

    def moments(
        self, W: Float[Tensor, "n M"], at: Process, shared: Shared | None, c: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """E[f_i] and E[f_i^2] under q(u), the effect of the bag included."""
        mean, variance = [], []
        for rows, block in _blocks(W):
            known = c + block @ at.w
            if shared is None:
                own = at.variances(block)
            else:
                bag = self.group.row[rows]
                known = known + shared.mean(at.w)[bag]
                lean = (shared.lean / shared.precision[:, None])[bag]
                own = at.variances(block - lean) + (1 / shared.precision)[bag]
            mean.append(known)
            variance.append(own)
        Ef, residual = torch.cat(mean), self.group.residual
        assert residual is not None
        return Ef, Ef.square() + torch.cat(variance) + residual

    def sums(
        self, W: Float[Tensor, "n M"], state: State, c: float
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, "M M"]]:
        """W'(pi - 1/2 - theta c) and W'theta W, the effects of the bags taken out."""
        pull, theta = torch.sigmoid(state[0]) - 0.5, curvature(state[1])
        b = theta.new_zeros(W.shape[1])
        R = theta.new_zeros(W.shape[1], W.shape[1])
        for rows, block in _blocks(W):
            R.addmm_((theta[rows, None] * block).mT, block)
            b += block.mT @ (pull[rows] - theta[rows] * c)
        if self.rule.effect:
            # u with e taken out: R - sum_b lean lean' / p
            lean, p, pulled = self._shared(W, state, c)
            R -= lean.mT @ (lean / p[:, None])
            b -= lean.mT @ (pulled / p)
        return b, R

    def share(self, state: State, Ef: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """What the bags add to the evidence bound where xi is at its best: E[f^2] = xi^2."""
        s, xi = state
        pi, log_none = torch.sigmoid(s), log_no_label(s, self.group)
        # sum_i (pi - 1/2) E f - log 2 cosh(xi/2), and the entropy of q(h)
        fit = (pi - 0.5) * Ef - xi.abs() / 2 - torch.log1p(torch.exp(-xi.abs()))
        entropy = softplus(s) - s * pi
        # log H E[G_b] - log(H + 1)
        right = torch.where(self.group.positive, -torch.expm1(log_none), log_none.exp())
        labels = self.rule.log_H * right - float(np.logaddexp(0.0, self.rule.log_H))
        return (fit + entropy).sum() + labels.sum()

    def _shared(self, W: Float[Tensor, "n M"], state: State, c: float) -> Shared:
        pull, theta = torch.sigmoid(state[0]) - 0.5, curvature(state[1])
        lean = theta.new_zeros(len(self.group.positive), W.shape[1])
        for rows, block in _blocks(W):
            lean.index_add_(0, self.group.row[rows], theta[rows, None] * block)
        p = self.rule.effect**-2 + segment_sum(theta, self.group.offsets)
        return Shared(lean, p, segment_sum(pull - theta * c, self.group.offsets))


def _blocks(W: Float[Tensor, "n M"]) -> Iterator[tuple[slice, Float[Tensor, "k M"]]]:
    """Some rows at a time, in float64."""
    size = GPU_ROWS if W.is_cuda else ROWS
    for start in range(0, len(W), size):
        rows = slice(start, min(start + size, len(W)))
        yield rows, W[rows].double()


# --- Predictions ----------------------------------------------------------------------------------
def log_expected_sigmoid(
    mean: Float[np.ndarray, " n"], std: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """log E[sigmoid(f)], f ~ N(mean, std^2), to about 1e-12.

    Gauss-Hermite quadrature where f is narrow. Where it is wide the sigmoid is a step to those
    nodes, and the other factor is the smooth one: E[sigmoid(f)] = E[Phi((mean - L) / std)], L
    logistic.
    """
    wide = std > WIDE
    out = np.empty(len(mean))
    out[~wide] = _narrow(mean[~wide], std[~wide])
    out[wide] = _wide(mean[wide], std[wide])
    return out


def log_none_shared(
    mean: Float[np.ndarray, " n"], std: Float[np.ndarray, " n"], tau: float
) -> float:
    """log E[prod_i E[sigmoid(-(f_i + e))]] of one bag, e ~ N(0, tau^2) shared, to about 1e-6.

    A sum over a lattice of e, as fine as the integrand is narrow, around its mode. Both come from
    E[sigmoid(f)] ~ sigmoid(m / sqrt(1 + pi s^2 / 8)), the numbers themselves do not.
    """
    scale = np.sqrt(1 + np.pi / 8 * np.square(std))
    # e / tau^2 = -sum_i sigmoid / scale at the mode: the left side rises, the right one falls
    low, high = -len(mean) * tau**2, 0.0
    for _ in range(60):
        mode = (low + high) / 2
        p = expit((mean + mode) / scale)
        low, high = (mode, high) if mode / tau**2 < -(p / scale).sum() else (low, mode)
    width = (tau**-2 + (p * (1 - p) / scale**2).sum()) ** -0.5
    step = min(0.7 * width, 0.5)
    e = step * np.arange(np.ceil((mode - REACH * tau) / step), (mode + REACH * tau) / step)
    rough = -np.square(e / tau) / 2
    rough -= np.array([_softplus((mean + x) / scale).sum() for x in e])
    e = e[rough > rough.max() - REACH**2 / 2]
    given = np.array([log_expected_sigmoid(-(mean + x), std).sum() for x in e])
    log_sum = np.logaddexp.reduce(given - np.square(e / tau) / 2)
    return min(float(log_sum + np.log(step / (tau * np.sqrt(2 * np.pi)))), 0.0)


def _narrow(mean: np.ndarray, std: np.ndarray) -> Float[np.ndarray, " n"]:
    x, weight = _hermite()
    f = mean[:, None] + std[:, None] * x
    return np.logaddexp.reduce(np.log(weight / np.sqrt(2 * np.pi)) - _softplus(-f), axis=1)


@functools.cache
def _hermite() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.hermite_e.hermegauss(HERMITE)


def _wide(mean: np.ndarray, std: np.ndarray) -> Float[np.ndarray, " n"]:
    # far below zero the mass lies where e^f does: E_m = e^(m + s^2/2) E_(-m - s^2)
    tail = mean < -np.square(std) / 2
    m = np.where(tail, -(mean + np.square(std)), mean)
    L = np.arange(-80, 80.25, 0.5)
    # density of the logistic, times the step of the trapezoid rule
    log_density = -np.abs(L) - 2 * _softplus(-np.abs(L)) + np.log(0.5)
    found = np.logaddexp.reduce(log_density + log_ndtr((m[:, None] - L) / std[:, None]), axis=1)
    return np.minimum(found + np.where(tail, mean + np.square(std) / 2, 0.0), 0.0)


def _softplus(s: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, s)
