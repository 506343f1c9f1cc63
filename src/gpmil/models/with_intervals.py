"""Intervals of slide probabilities: from a posterior of w as wide as the labels leave it.

Predictions are made with q(u), which is too narrow to say how unsure they are. A fit keeps a wider
N(E[w], J^-1) beside it (inference/laplace.py), for intervals alone.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.special import expit, logit, ndtri

from gpmil.coupling.operator import parts, sparse_precision
from gpmil.data.bags import Bags
from gpmil.decide import calibration
from gpmil.fast.lanes import one_blas_thread
from gpmil.files.persistence import ARRAYS as FILE
from gpmil.inference import leave_out
from gpmil.inference.laplace import laplace
from gpmil.inference.solvers import Problem
from gpmil.inference.steps import Solution
from gpmil.models.base import both_classes, log_odds, pooled, resolve_device
from gpmil.models.checks import count
from gpmil.models.fitted import CPU, FittedGP, residual, too_large
from gpmil.models.odds_quantiles import dense_ends, ends_from_centre, ends_from_tails
from gpmil.models.saved import Arrays, Card
from gpmil.models.saved_checks import Array, Damaged, Symbols
from gpmil.moments import orthant
from gpmil.moments.orthant import Expansion
from gpmil.moments.orthant_large import LargeSlide
from gpmil.process.sparse_gp import Posterior, Predictor, marginal

WITHIN = (np.finfo(float).tiny, np.nextafter(1.0, 0.0))  # probabilities whose log odds are finite
HUGE = 5000  # instances per bag above which an interval is expanded once, not at both of its ends
NARROW = (
    "intervals of slides are too narrow: the model was fitted by an earlier gpmil, which kept only "
    "the covariance that predictions are made with. Fit it again for intervals that hold."
)


class IntervalGP(FittedGP):
    """A Gaussian-process model that says how unsure its probabilities of slides are."""

    ARRAYS = FittedGP.ARRAYS | {
        "interval_mean_": Array(("k",), "finite", optional=True),
        "interval_precision_": Array(("k", "k"), "precision", optional=True),
    }

    # of w, as whitened_mean_ and whitened_precision_; None in models of earlier versions
    interval_mean_: Float[np.ndarray, " k"] | None = None
    interval_precision_: Float[np.ndarray, "k k"] | None = None

    # --- Fit ----------------------------------------------------------------------------------

    def _keep_wide(self, problem: Problem, solution: Solution) -> None:
        """What intervals are made of."""
        self.interval_mean_, self.interval_precision_ = None, None
        if self.learns_range:
            wide = laplace(problem, solution.w, solution.curvature)
            self.interval_mean_ = wide.w.cpu().numpy()
            self.interval_precision_ = wide.R.cpu().numpy()

    def _wide(self, device: torch.device) -> Posterior:
        """N(E[w], J^-1); of models of earlier versions q(u)."""
        if self.interval_mean_ is None or self.interval_precision_ is None:
            self._say_once([NARROW] if self.learns_range else [])
            return self._posterior(device)
        kept = self.interval_mean_, self.interval_precision_
        return Posterior.build(*(torch.from_numpy(a).to(device) for a in kept))

    def _restore(self, arrays: Arrays, card: Card, sizes: Symbols) -> None:
        super()._restore(arrays, card, sizes)
        there = {self.interval_mean_ is None, self.interval_precision_ is None}
        wanted = len(self.whitened_mean_)
        if len(there) > 1 or sizes.get("k", wanted) != wanted:
            raise Damaged(
                f"{FILE}: interval_mean_ and interval_precision_: expected both, of {wanted} "
                "numbers a side as whitened_mean_, or neither"
            )

    # --- Predictions --------------------------------------------------------------------------

    @one_blas_thread()
    def predict_interval(
        self, bags, *, level: float = 0.9, n_draws: int | None = None, base_rate: bool = True
    ) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """Where P(y = 1) lies with probability `level`, of all that more bags could still change.

        That is the process u, as far as the labels leave it open, and the level of all log odds,
        which settings and calibration have from a few bags; `base_rate=False` leaves the level as
        it is: the interval of P(y = 1 | u). The prediction lies in the interval. What both hold
        on cohorts with a known truth is in docs/explanation/proof.md.

        u is wider here than q(u), with which predictions are made (inference/laplace.py); models
        of earlier versions have q(u) alone, and say so once.

        Both ends come from the log odds expanded to second order at u that are likely there: no
        draws, a few times the cost of the prediction. On a CPU bags of more than 5,000 instances
        are expanded once, at the mean of u. `n_draws` draws u in place of that, slowly.
        """
        bags = self._check_predictable(bags)
        below, _ = calibration.tails(level)
        device = resolve_device(self.device)
        if n_draws is not None:
            count("n_draws", n_draws, least=2)
            draws = self._draws(bags, int(n_draws), device)
            drawn = np.clip(np.stack(calibration.interval(draws, level), axis=1), *WITHIN)
            ends = logit(drawn)
        else:
            ends = self._ends(bags, np.ones(len(bags), dtype=bool), below, device)
        log_p = self._calibrate(self._said(bags, device)[0])
        low, high = self._probable(ends, log_p, below if base_rate else None).T
        return low, high

    def _probable(
        self, ends: Float[np.ndarray, "B 2"], log_p: Float[np.ndarray, " B"], below: float | None
    ) -> Float[np.ndarray, "B 2"]:
        """From log odds given u; wider by what is not known of their level, unless it is."""
        half = 0.0 if below is None else -ndtri(below) * self._level_deviation()
        low, high = expit(calibration.widened(ends, log_odds(log_p), half)).T
        p = both_classes(log_p)[:, 1]  # within to the last digit
        return np.stack([np.minimum(low, p), np.maximum(high, p)], axis=1)

    def _interval(
        self, bags: Bags, wanted: Bool[np.ndarray, " B"], below: float, device: torch.device,
        log_p: Float[np.ndarray, " B"],
    ) -> Float[np.ndarray, "B 2"]:  # fmt: skip
        return self._probable(self._ends(bags, wanted, below, device), log_p, below)

    def _ends(
        self, bags: Bags, wanted: Bool[np.ndarray, " B"], below: float, device: torch.device
    ) -> Float[np.ndarray, "B 2"]:
        """Log odds, calibrated, that are below, and above, given u, with this probability.

        Voices rise and fall together: an end of the average is the average of their ends.
        """
        ends = np.full((len(bags), 2), np.nan)
        found = [voice._own_ends(bags, wanted, below, device)[wanted] for voice in self._voices()]
        # log P(all negative) = -log(1 + exp(log odds))
        log_p = self._calibrate(pooled([-np.logaddexp(0, own).ravel() for own in found]))
        ends[wanted] = log_odds(log_p).reshape(-1, 2)
        return ends

    def _own_ends(
        self, bags: Bags, wanted: Bool[np.ndarray, " B"], below: float, device: torch.device
    ) -> Float[np.ndarray, "B 2"]:
        """The same by this model alone, not calibrated."""
        large = too_large(bags, device)
        ends = np.full((len(bags), 2), np.nan)
        with torch.no_grad():
            q, strength = self._wide(device), self._predict_strength(bags)
            predictor = Predictor.build(self._gp(device), q, self.mean_)
            for part, x in self._dense(bags, wanted & ~large, strength, device):
                bag = leave_out.padded_bag(predictor.gp, part, x, part.mask[:, 0])
                ends[part.bags] = np.stack(dense_ends(bag, q, self.mean_, below), 1)
            for b in np.flatnonzero(wanted & large):
                ends[b] = self._large_ends(bags[int(b)], predictor, q, strength, below)
        return ends

    def _large_ends(
        self, bag: Bags, predictor: Predictor, q: Posterior, strength: float, below: float
    ) -> tuple[float, float]:
        """The same for one bag too large for dense matrices on the CPU."""
        (part,) = parts(bag.adjacency, bag.offsets, strength)
        x, gp = self._inputs(bag.features, CPU), predictor.gp
        W = gp.whiten_bags(x)
        PG = q.shrink(W).mT
        mean, variance = torch.empty(len(x)).double(), torch.empty(len(x)).double()
        G, rows = torch.empty_like(PG), part.rows
        mean[rows], variance[rows] = marginal(predictor, part, x[rows])
        G[rows] = part.apply(PG[rows])
        # diag S0 = diag(S - G G') >= diag Sigma + tau^2
        least = part.diagonal() + gp.effect**2
        variance[rows] = (variance - G.square().sum(1))[rows].maximum(least)
        slide = LargeSlide(
            sparse_precision(bag.adjacency, strength),
            W.new_zeros(len(x), 0),
            *residual(gp, x, W),
            effect=gp.effect,
        )

        def expand(at: torch.Tensor) -> Expansion:
            return slide.expand(mean + G @ at[0], variance, PG)

        if len(x) > HUGE:
            low, high = ends_from_centre(expand(PG.new_zeros(1, PG.shape[1])), below)
        else:
            low, high = ends_from_tails(expand, slide.slope(mean, variance, G)[None], below)
        return float(low[0]), float(high[0])

    def _draws(self, bags: Bags, n_draws: int, device: torch.device) -> np.ndarray:
        """P(y = 1 | u) of every bag for draws of u."""
        log_p = pooled([voice._own_draws(bags, n_draws, device) for voice in self._voices()])
        return -np.expm1(self._calibrate(log_p.ravel()).reshape(log_p.shape))

    def _own_draws(
        self, bags: Bags, n_draws: int, device: torch.device
    ) -> Float[np.ndarray, "s B"]:
        """log P(all negative | u) by this model alone, not calibrated."""
        log_p = np.empty((n_draws, len(bags)))
        with torch.no_grad():
            gp, q = self._gp(device), self._wide(device)
            noise = np.random.default_rng(0).standard_normal((len(q.w), n_draws))
            # w ~ N(E[w], J^-1)
            w = q.w[:, None] + torch.linalg.solve_triangular(
                q.chol_R.mT, torch.from_numpy(noise).to(device), upper=True
            )
            every, strength = np.ones(len(bags), dtype=bool), self._predict_strength(bags)
            for part, x in self._dense(bags, every, strength, device):
                bag = leave_out.padded_bag(gp, part, x, part.mask[:, 0])
                # m | u ~ N(Sigma (c + W w), Sigma + Sigma (K - W W') Sigma)
                S = bag.sigma + bag.sigma @ bag.K @ bag.sigma - bag.H @ bag.H.mT
                S, mu = (S + S.mT) / 2, self.mean_ + bag.H @ w
                for s in range(n_draws):
                    found = orthant.log_orthant(mu[..., s], S, bag.mask, effect=gp.effect)
                    log_p[s, part.bags] = found.log_p.cpu().numpy()
        return log_p
