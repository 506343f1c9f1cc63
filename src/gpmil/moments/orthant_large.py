"""log P(all m < 0) for one slide of thousands of patches on the CPU, without dense EP.

The covariance is S = Sigma + Sigma V Sigma with Sigma^-1 = P = I + lambda C sparse and
V = F F' + E the covariance of f: F of low rank, E what the inducing points leave unexplained.
EP runs on a simpler V, U U' + D with U = [F, leading part of E] and D diagonal, for which every
step is sparse plus low rank. Its log P is stationary in the sites, so it is enough to keep them
and to compute the Gaussian integral once more with the exact S. With T the precisions of the sites

    (T^-1 + S)^-1 = P (P T^-1 P + P + V)^-1 P,
    log|I + T^.5 S T^.5| = sum log tau - 2 log|P| + log|P T^-1 P + P + V|:

one dense Cholesky factorisation and no solve with Sigma. A slide effect s is summed over as in
orthant_effect.py, from the simpler V; what the exact one changes is found at s* in this way, and
brought to other s by d f / dS = (g g' - (T^-1 + S)^-1) / 2, g = d f / d mu. Dense EP
(`orthant.log_orthant`) is simpler, and faster below some 1,500 patches or on a GPU.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.moments.effect_terms import AtOne, Correlations, Terms
from gpmil.moments.low_rank import CHUNK, Pairs, Problem, Rows, Step, times
from gpmil.moments.orthant import Expansion, LogProbability, settle
from gpmil.moments.orthant_effect import BEFORE, OverEffect, Profile, integrate, middle
from gpmil.moments.sampling import log_union, relevant
from gpmil.moments.sites import Gauss, Sites, first_sites, fixed_point, site_terms
from gpmil.warn import warn_caller

FLOOR = 1e-6  # least tau S_ii: a site of zero precision has no inverse
TOLERANCE = 1e-3  # sites enter log P to second order
MAX_ITER = 60
# Share of the change of log P from the simpler to the exact V that is counted as error; measured on
# slides of 126 to 2,000 patches against dense EP, the error was 0.03 of it at most from rank 10 on.
SHARE_OF_CHANGE = 0.03
GROUPS = 3  # of values of an effect that share a bend: it is then 5 % off at most


def log_orthant_large(
    mu: Float[Tensor, " n"],
    variance: Float[Tensor, " n"],
    precision: sp.csr_array | sp.csr_matrix,
    factor: Float[Tensor, "n m"],
    residual: Rows,
    residual_diagonal: Float[Tensor, " n"],
    *,
    rank: int = 128,
    effect: float = 0.0,
    seed: int = 0,
) -> LogProbability:
    """log P(all m < 0) of one bag, m ~ N(mu, Sigma + Sigma (F F' + E) Sigma).

    Parameters
    ----------
    mu, variance
        Mean of m and the exact diagonal of its covariance.
    precision
        P = Sigma^-1 = I + lambda C, sparse (n, n).
    factor
        F = W chol(R^-1), (n, m): the part of V that the inducing points explain.
    residual, residual_diagonal
        `residual(i)` gives the rows i of E = K - W W', (k, n); and the diagonal of E.
    rank
        How many columns of a pivoted Cholesky factor of E join F while EP runs.
    effect
        tau where tau^2 11' is a part of E.
    seed
        Fixes the draws used in the right tail.
    """
    slide = LargeSlide(precision, factor, residual, residual_diagonal, rank, effect)
    return slide.log_orthant(mu, variance, seed=seed)


class LargeSlide:
    """One bag of many instances, made ready for several means of m."""

    def __init__(
        self,
        precision: sp.csr_array | sp.csr_matrix,
        factor: Float[Tensor, "n m"],
        residual: Rows,
        residual_diagonal: Float[Tensor, " n"],
        rank: int = 128,
        effect: float = 0.0,
    ) -> None:
        """Arguments as those of `log_orthant_large`; the factor may have no column at all."""
        self.factor, self.effect = factor.double(), effect
        # E without tau^2 11', over which is summed
        self.residual = (lambda i: residual(i) - effect**2) if effect else residual
        diagonal = (residual_diagonal.double() - effect**2).clamp(min=0.0)
        self.problem = Problem(precision, self.factor, self.residual, diagonal, rank)

    def log_orthant(
        self, mu: Float[Tensor, " n"], variance: Float[Tensor, " n"], *, seed: int = 0
    ) -> LogProbability:
        """log P(all m < 0)."""
        none = self.factor.new_zeros(len(mu), 0)
        return self.expand(mu, variance, none, seed=seed).value

    def slope(
        self, mu: Float[Tensor, " n"], variance: Float[Tensor, " n"], G: Float[Tensor, "n k"]
    ) -> Float[Tensor, " k"]:
        """d log P / dx at mu + G x with the simpler V: no dense matrix."""
        ran = self._run(mu.double(), variance.double())
        # d log P / d mu = nu - tau mhat
        pull = (ran.sites.nu - ran.sites.tau * ran.step.gauss.mean)[0]
        if self.effect:
            pairs = Pairs(self.problem, ran.sites, ran.step)
            over = self._over_effect(ran, pairs, None)
            pull = over.pulls(over.terms.sites())[0] @ over.weight[0]
        return G[self.problem.order].mT @ pull

    def expand(
        self,
        mu: Float[Tensor, " n"],
        variance: Float[Tensor, " n"],
        PG: Float[Tensor, "n k"],
        *,
        seed: int = 0,
    ) -> Expansion:
        """log P(all m < 0), and how it changes as mu moves along G; P G is given."""
        mu, variance = mu.double(), variance.double()
        ran = self._run(mu, variance)
        if not ran.converged:
            warn_caller(
                f"EP has not converged in {MAX_ITER} iterations on a bag of {len(mu)} instances: "
                "its probability may be off by more than its error says",
            )
        pairs = Pairs(self.problem, ran.sites, ran.step)
        found = self._with_effect if self.effect else self._without
        log_p, error, slope, bend = found(ran, pairs, PG)
        value = self._settle(log_p, error + pairs.error, mu, variance, seed)
        return Expansion(value, slope[None], bend[None])

    def _without(self, ran: "_Ran", pairs: Pairs, PG: Float[Tensor, "n k"]) -> "_Expanded":
        """log P as one integral."""
        gauss, inside = ran.step.gauss, torch.ones_like(ran.variance, dtype=torch.bool)
        exact = self._exact(ran.mu, ran.sites, PG)
        log_p = exact.log_gauss + site_terms(gauss, ran.sites, inside).sum(-1) + pairs.c3()
        change = (exact.log_gauss - gauss.log_gauss).abs()
        return log_p, SHARE_OF_CHANGE * change, exact.slope, exact.bend

    def _with_effect(self, ran: "_Ran", pairs: Pairs, PG: Float[Tensor, "n k"]) -> "_Expanded":
        """log P as a sum over the effect."""
        change = _Change(self, ran)
        over = self._over_effect(ran, pairs, change)
        slope, bend = self._over_values(over, ran, PG) if PG.shape[1] else (PG[0], PG[:0])
        error = over.error + SHARE_OF_CHANGE * (over.weight * change.size).sum(-1)
        return over.log_p, error, slope, bend

    def _run(self, mu: Float[Tensor, " n"], variance: Float[Tensor, " n"]) -> "_Ran":
        """EP on the simpler V, with an effect at s*."""
        problem = self.problem
        steps: list[Step] = []
        mu, variance = mu[problem.order], (variance[problem.order] - self.effect**2)[None]
        inside = torch.ones_like(variance, dtype=torch.bool)
        s = mu.new_zeros(1)
        if self.effect:
            s = middle(mu[None], variance, inside, self.effect)
            mu = mu + s

        def step(sites: Sites) -> Gauss:
            steps[:] = [problem.step(mu, sites)]
            return steps[0].gauss

        _, sites, _, converged = fixed_point(
            step,
            first_sites(mu[None], variance, inside),
            variance,
            inside,
            tol=TOLERANCE,
            max_iter=MAX_ITER,
            floor=FLOOR,
        )
        return _Ran(mu, variance, s, sites, steps[0], bool(converged))

    def _over_effect(
        self, ran: "_Ran", pairs: Pairs, change: Callable[[Terms], Tensor] | None
    ) -> OverEffect:
        """The sum over the effect; `change` is what the exact V adds."""
        inside, none = torch.ones_like(ran.variance, dtype=torch.bool), torch.zeros_like(ran.s)
        at = AtOne(ran.s, ran.mu[None], ran.variance, ran.sites, ran.step.gauss, none, inside)
        profile = Profile(at, Correlations(pairs.times, pairs.powers))
        return integrate(profile, self.effect, change)

    def _over_values(
        self, over: OverEffect, ran: "_Ran", PG: Float[Tensor, "n k"]
    ) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
        """Slope and bend from those at values of the effect, as in orthant.py.

        Slopes are those of the simpler V at every value; what the exact one changes in them, and
        the bends, come from a few dense factorisations, each for some values next to each other.
        """
        tau, nu = over.terms.sites()
        pi, tau = over.weight[0], torch.maximum(tau, (FLOOR / ran.variance)[..., None])
        own, many = _together(pi, tau[0].sum(0))
        some = Sites(tau @ own, nu @ own)
        tau, nu, M = (torch.cat([x, x @ own], -1) for x in (tau, nu, over.terms.M))
        g = nu - tau * over.terms.means(Sites(tau, nu), M)
        order = self.problem.order
        share = over.shares(self.problem.smooth(PG[order])[None])
        PG = torch.cat([PG - share, torch.ones_like(PG[:, :1])], 1)  # P 1 = 1
        # G'g = (P G)' Sigma g
        slopes = PG[order].mT @ self.problem.smooth(g[0])
        slopes, theirs = slopes[:, : len(pi)], slopes[:, len(pi) :]
        more, bend = PG.new_zeros(len(slopes)), PG.new_zeros(len(slopes), len(slopes))
        for j, mu in enumerate(ran.mu + (over.further[0] @ own)[:, None]):
            exact = self._exact(mu, Sites(some.tau[..., j], some.nu[..., j]), PG)
            more += many[j] * (exact.slope - theirs[:, j])
            bend += many[j] * exact.bend
        slope, bend = (x[0] for x in over.joined(share, slopes[None], bend[None]))
        return slope + more[:-1] + share[0] * more[-1], bend

    def _settle(
        self, log_p: Tensor, error: Tensor, mu: Tensor, variance: Tensor, seed: int
    ) -> LogProbability:
        """With the right tail put right."""
        t = mu / variance.sqrt()

        def union(_: int) -> tuple[float, float]:
            rows = torch.nonzero(relevant(torch.special.log_ndtr(t))).flatten()
            cov = _covariance(self.problem, rows, self.factor, self.residual) + self.effect**2
            return log_union(mu[rows], cov, seed=seed)

        return settle(log_p, error, t[None], union)

    def _exact(
        self,
        mu: Float[Tensor, " n"],
        sites: Sites,
        PG: Float[Tensor, "n k"],
        Z: Float[Tensor, "n j"] | None = None,
    ) -> "_Exact":
        """lZG with the exact covariance: one dense factorisation of P T^-1 P + P + V = L L'.

        And its first and minus its second derivative in x at mu + G x. With y = T^-1 nu - mu those
        in mu are (T^-1 + S)^-1 y and (T^-1 + S)^-1 = P (L L')^-1 P. Also z'V z of the columns of Z.
        """
        problem, factor, residual = self.problem, self.factor, self.residual
        back = torch.argsort(problem.order)
        tau, nu, mu = sites.tau[0, back], sites.nu[0, back], mu[back]
        p = sp.csr_array(problem.p[back.numpy()][:, back.numpy()])
        dense = torch.empty(len(mu), len(mu), dtype=torch.float64)
        for rows in torch.arange(len(mu)).split(CHUNK):
            dense[rows[0] : rows[-1] + 1] = residual(rows)
            dense[rows[0] : rows[-1] + 1].addmm_(factor[rows], factor.mT)
        forms = None if Z is None else (Z[back] * (dense @ Z[back])).sum(0)
        sparse = sp.coo_array(p @ sp.diags_array(1 / tau.numpy()) @ p + p)
        row, col = (torch.from_numpy(i.astype(np.int64)) for i in sparse.coords)
        dense.view(-1)[row * len(mu) + col] += torch.from_numpy(sparse.data)
        lower, failed = torch.linalg.cholesky_ex(dense)
        if int(failed):
            raise ValueError(
                "expected F F' + E to be positive semi-definite, found that it is not: "
                "was the residual kernel computed from rounded terms?"
            )
        del dense
        y = nu / tau - mu
        right = torch.cat([PG, times(p, y[:, None])], dim=1)
        solved = torch.linalg.solve_triangular(lower, right, upper=False)
        X, white = solved[:, :-1], solved[:, -1]
        log_det = tau.log().sum() - 2 * problem.log_det_p + 2 * lower.diagonal().log().sum()
        log_gauss = ((-log_det + (nu * nu / tau).sum() - white.square().sum()) / 2)[None]
        return _Exact(log_gauss, X.mT @ white, X.mT @ X, forms)


class _Exact(NamedTuple):
    """What one dense factorisation gives."""

    log_gauss: Float[Tensor, " 1"]
    slope: Float[Tensor, " k"]
    bend: Float[Tensor, "k k"]
    forms: Float[Tensor, " j"] | None


_Expanded = tuple[Tensor, Tensor, Tensor, Tensor]  # log P, its error, slope and bend


class _Ran(NamedTuple):
    """EP on the simpler V, with an effect at one value of it; in the order of the problem."""

    mu: Float[Tensor, " n"]  # with s
    variance: Float[Tensor, "1 n"]  # diagonal of S
    s: Float[Tensor, " 1"]
    sites: Sites
    step: Step
    converged: bool


class _Change:
    """What the exact V adds to f at values of the effect; `size` is how much that is."""

    def __init__(self, slide: LargeSlide, ran: _Ran) -> None:
        self.slide, self.ran = slide, ran
        self.size = ran.mu.new_zeros(1, 1)

    def __call__(self, terms: Terms) -> Float[Tensor, "1 k"]:
        """f(s*) exactly; of the other values g'dS g / 2 = z'dV z / 2, z = Sigma g, to first order.

        The rest, -tr (T^-1 + S)^-1 dS / 2, goes with how much the constraints count.
        """
        problem, ran = self.slide.problem, self.ran
        Z = problem.smooth(terms.pulls()[0])
        exact = self.slide._exact(ran.mu, ran.sites, Z[:, :0], Z)
        assert exact.forms is not None
        # z'(U U' + D) z
        simpler = (problem.u.mT @ Z).square().sum(0) + problem.d @ Z.square()
        pulled = (exact.forms - simpler)[None] / 2
        rest = exact.log_gauss - ran.step.gauss.log_gauss - pulled[:, BEFORE]
        change = pulled + rest[:, None] * (1 - terms.much).clamp(min=0.0)
        self.size = change.abs()
        return change


def _together(
    pi: Float[Tensor, " k"], amount: Float[Tensor, " k"]
) -> tuple[Float[Tensor, "k g"], Float[Tensor, " g"]]:
    """Values of the effect in groups that count alike: the shares of their sites, and how often.

    Two values, one of them with no site at all, are served without error: a group has the sites of
    those that count, as often as these.
    """
    weight = pi * amount
    before = (weight.cumsum(0) - weight / 2) / weight.sum()
    group = (GROUPS * before).long().clamp(max=GROUPS - 1)
    own = torch.nn.functional.one_hot(group, GROUPS) * weight[:, None]
    own = own[:, own.sum(0) > 0]
    share = own / own.sum(0)
    return share, own.sum(0) / (amount @ share)


def _covariance(
    problem: Problem, rows: Int[Tensor, " k"], factor: Float[Tensor, "n m"], residual: Rows
) -> Float[Tensor, "k k"]:
    """S = Sigma + Sigma V Sigma for some instances, exactly."""
    where = torch.argsort(problem.order)
    unit = torch.zeros(len(where), len(rows), dtype=torch.float64)
    unit[where[rows], torch.arange(len(rows))] = 1.0
    sigma = problem.smooth(unit)[where]
    out = sigma[rows] + (sigma.mT @ factor) @ (factor.mT @ sigma)
    for some in torch.arange(len(where)).split(CHUNK):
        out += sigma[some].mT @ (residual(some).double() @ sigma)
    return (out + out.mT) / 2
