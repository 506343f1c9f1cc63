"""Expectation propagation for one bag at a time on a CPU: log P alone, as ep.py has it.

ep.py works on batches of padded bags in torch, for GPUs and wherever sites, means and covariances
are wanted as well. Large bags gain nothing from batches on a CPU: here a bag is taken through all
of its iterations while its matrices are in the cache, without padding, and with the vector
arithmetic compiled (fast/sites.py). What a bag gets does not depend on others to the last bit.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.fast import compiled
from gpmil.moments.ep import DEEP, EP, EPS, FIRST_SHARE, SHARE_OF_C3
from gpmil.moments.sites import DEPTH, MAX_ITER, WEAK


class LogP(NamedTuple):
    """What EP finds of one bag."""

    log_p: float  # log P(all m < 0) of plain EP
    c3: float  # to be added to it
    c4: float
    error: float  # estimated error of log_p + c3
    n_iter: int
    converged: bool


def log_p(
    mu: Float[Tensor, " n"], cov: Float[Tensor, "n n"], tol: float, max_iter: int = MAX_ITER
) -> LogP | None:
    """log P(all m < 0) of one bag; None without Numba, or where the deep tail asks for ep.py."""
    found = settled(mu, cov, tol, max_iter)
    return None if found is None else found[1]


def settled(
    mu: Float[Tensor, " n"], cov: Float[Tensor, "n n"], tol: float, max_iter: int = MAX_ITER
) -> tuple["Bag", LogP] | None:
    """The same with the bag, which has sites, mean and covariance."""
    kernel = compiled.sites()
    if kernel is None:
        return None
    try:
        bag = Bag(mu, cov, kernel)
        result = _iterate(bag, tol, max_iter)
    except np.linalg.LinAlgError:  # said by ep.py, which knows all bags
        return None
    return None if result is None else (bag, result)


def _iterate(bag: "Bag", tol: float, max_iter: int) -> LogP | None:
    """To the fixed point of the sites; None where they leave the range of the compiled steps.

    A loop of its own, the twin of `sites.fixed_point`: cavities, new sites and the test for
    convergence are one compiled call, and a bag may give up.
    """
    anderson = Anderson(bag.unit, bag.kernel)
    for i in range(1, max_iter + 1):
        change, size = bag.step()
        if not bag.in_range:
            return None
        done = change <= tol * size
        if done or i == max_iter:
            return bag.finish(i, done)
        bag.x = anderson.step(bag.x, bag.f)
    return None


class Bag:
    """One bag with its sites x = (tau, nu), their change f, and the Gaussian that they make."""

    def __init__(self, mu: Tensor, cov: Tensor, kernel: Any) -> None:
        # one layout of matrices: every other one would be compiled once more
        self.kernel, self.mu, self.cov = kernel, mu.numpy(), np.ascontiguousarray(cov.numpy())
        self.prior = self.cov.diagonal().copy()
        self.unit = np.concatenate([self.prior, np.sqrt(self.prior)])
        n = len(mu)
        self.x, largest = kernel.first(self.mu, self.prior, FIRST_SHARE)
        self.in_range = bool(largest < kernel.FURTHEST)
        self.f, self.gauss = np.empty(2 * n), np.empty((3, n))
        self.room = kernel.room(n, self.cov)

    def step(self) -> tuple[float, float]:
        """One evaluation of the sites; how far they move, and how large they are."""
        low = (self.x[: len(self.mu)] * self.prior).max() <= DEEP
        self.in_range = bool(self.in_range and low)
        if not self.in_range:
            return 0.0, 0.0
        change, size, largest = self.kernel.step(
            self.cov, self.mu, self.prior, self.x, self.gauss, self.f, *self.room
        )
        self.in_range = bool(largest < self.kernel.FURTHEST) and np.isfinite(change)
        return change, size

    def as_batch(self, found: LogP) -> EP:
        """What was found as ep.py has it, of a batch of one bag."""
        *values, n_iter, converged = found
        tau, nu = torch.from_numpy(self.x)[None].split(len(self.mu), dim=-1)
        # copies, aligned as torch has it
        mean, V = (torch.tensor(a)[None] for a in (self.gauss[0], self.V))
        numbers = torch.tensor([self.log_gauss, *values], dtype=torch.float64)
        log_gauss, plain, c3, c4, error = numbers.split(1)
        many, done = torch.tensor([n_iter]), torch.tensor([converged])
        return EP(tau, nu, mean, V, log_gauss, plain, c3, c4, error, many, done)

    def finish(self, n_iter: int, converged: bool) -> LogP:
        """log P, its corrections and its error, as `ep._finish` has them."""
        n = len(self.mu)
        Z, _ = self.room
        first = Z.shape[1]
        half, white = Z[first : first + n], Z[first + n]
        self.V = self.cov - half @ half.T
        # lZG = -log|B|/2 + s's/2 - (s - T^.5 mu)'x/2
        log_det = float(np.log(Z.diagonal()).sum())
        tau, nu = self.x[:n], self.x[n:]
        s = np.divide(nu, np.sqrt(tau), out=np.zeros(n), where=tau > 0)
        self.log_gauss = float(s @ s - white @ white) / 2 - log_det
        terms, size, t = self.kernel.closed(self.gauss, self.x)
        c3, size3, c4, size4 = self.kernel.paired(self.V, *self.kernel.cumulants(t))
        rounding = EPS * (abs(self.log_gauss) + size + n)
        error = size4 / 48 + SHARE_OF_C3 * size3 / 12 + rounding
        return LogP(self.log_gauss + terms, c3 / 12, c4 / 48, error, n_iter, converged)


class Anderson:
    """The compiled twin of `sites.Anderson`, for one bag: what it remembers are rows.

    On so few numbers torch spends its time on calls: a step takes five times as long, or more.
    """

    def __init__(self, unit: Float[np.ndarray, " k"], kernel: Any) -> None:
        self.dx, self.df = np.zeros((DEPTH, len(unit))), np.zeros((DEPTH, len(unit)))
        self.unit, self.slot, self.kernel = unit, -1, kernel
        self.x, self.f = np.empty(len(unit)), np.empty(len(unit))  # of the step before

    def step(self, x: Float[np.ndarray, " k"], f: Float[np.ndarray, " k"]) -> np.ndarray:
        """The next x from x and f = G(x) - x."""
        memory = (self.dx, self.df, self.x, self.f)
        new = self.kernel.accelerated(x, f, self.unit, *memory, self.slot, WEAK)
        self.slot = (self.slot + 1) % DEPTH
        return new
