"""Predictions of a fitted Gaussian-process model: everything that follows from q(u)."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.special import expit, logit, ndtr, ndtri
from sklearn.utils.validation import check_is_fitted

from gpmil.coupling.operator import Dense, dense_parts, parts, sparse_precision
from gpmil.data.bags import Bags
from gpmil.decide import calibration
from gpmil.decide.refer import ReferRule
from gpmil.inference import leave_out
from gpmil.models import with_context
from gpmil.models.base import (
    InstancePredictions,
    Predictions,
    log_odds,
    pooled,
    resolve_device,
)
from gpmil.models.beside import Beside
from gpmil.models.checks import count, number, require_numbers, share
from gpmil.models.cross_fit import Marks
from gpmil.models.odds_quantiles import dense_ends, ends_from_centre, ends_from_tails
from gpmil.models.saved_checks import Array, or_none, strength, trials
from gpmil.models.with_context import SlideEvidence
from gpmil.models.with_novelty import UNKNOWN
from gpmil.models.with_threshold import DecidingGP
from gpmil.moments import orthant
from gpmil.moments.orthant import Expansion
from gpmil.moments.orthant_large import LargeSlide, log_orthant_large
from gpmil.process.sparse_gp import Predictor, SparseGP, joint, marginal

logger = logging.getLogger("gpmil")
CPU = torch.device("cpu")
LARGE = 1500  # instances per bag above which dense matrices cost more than sparse ones on a CPU
WITHIN = (np.finfo(float).tiny, np.nextafter(1.0, 0.0))  # probabilities whose log odds are finite
HUGE = 5000  # instances per bag above which an interval is expanded once, not at both of its ends


def _too_large(bags: Bags, device: torch.device) -> Bool[np.ndarray, " B"]:
    """Bags whose dense matrices cost more than sparse ones."""
    return (bags.sizes > LARGE) & (device.type == "cpu")


def _residual(
    gp: SparseGP, x: Float[torch.Tensor, "n d"], W: Float[torch.Tensor, "n M"]
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Float[torch.Tensor, " n"]]:
    """K - W W' in one bag: some of its rows when asked for, and its diagonal."""
    diagonal = gp.kernel.diagonal(x) + gp.shared - W.square().sum(1)
    return lambda i: gp.within(x[i], x) - W[i] @ W.mT, diagonal


class FittedGP(DecidingGP):
    """What a model knows once it is fitted, and what it says of bags."""

    ARRAYS = DecidingGP.ARRAYS | {"evidence_trace_": Array(("steps",), "trace", optional=True)}
    NUMBERS = DecidingGP.NUMBERS | {
        "coupling_": strength,
        "slide_effect_": partial(number, least=0),
        "loo_log_likelihood_": or_none(number),
        "tuning_trace_": or_none(trials),
    }
    LATER: ClassVar[dict[str, dict[str, Any]]] = DecidingGP.LATER | {
        "slide_effect": {"slide_effect_": 0.0},
        "slide_context": with_context.WITHOUT,
    }

    coupling_: float
    slide_effect_: float
    evidence_trace_: np.ndarray | None  # None where nothing was optimised
    tuning_trace_: list[dict[str, Any]] | None  # None where nothing was learned
    loo_log_likelihood_: float | None
    flags: bool

    def predict_instances(
        self, bags, *, rate: float = 0.1, within: str = "bag", weights: str = "patch"
    ) -> InstancePredictions:
        """P(h_i = 1) of every instance with mean and deviation of m*_i (eq. pred_instance).

        Of a model fitted with calibrated=True and labelled patches they are calibrated by those,
        and by what the model says of their bag (`gpmil.decide.patch_calibration`).

        `doubt` is how unsure the model is of the process f at the instance: its deviation as a
        share of that before any bag was seen, from 0 (known) to 1 (nothing learned there).

        Of a model fitted with flags=True also a p-value against the patches of negative bags, and
        the patches marked at a false discovery rate of `rate`, controlled `within` every "bag" or
        over all bags given ("cohort"). `weights="bag"` counts negative bags in place of their
        patches, for large cohorts. See `gpmil.decide.marks` for what is promised.
        """
        bags, marks = self._check_predictable(bags), Marks(rate, within, weights)
        if self.cross_fit_ is not None and self.cross_fit_.patches is not None:
            both = self.predict_all(bags, **vars(marks))
            assert both.instances is not None
            return both.instances
        beside = self._beside(bags, resolve_device(self.device))
        return self._marked(self._instances(bags, beside), marks)

    def _marked(self, found: InstancePredictions, marks: Marks) -> InstancePredictions:
        """With p-values and flags, where the model was fitted with them."""
        if self.cross_fit_ is None or not self.flags:
            return found
        return self.cross_fit_.marked(found, marks)

    def _instances(self, bags: Bags, beside: Beside | None = None) -> InstancePredictions:
        device = resolve_device(self.device)
        mean, std = np.empty(bags.n_instances), np.empty(bags.n_instances)
        with torch.no_grad():
            predictor = self._predictor(device) if beside is None else beside.predictor
            for part in parts(bags.adjacency, bags.offsets, self._predict_strength(bags), device):
                rows = part.rows.cpu().numpy()
                x = self._inputs(bags.features[rows], device)
                sizes = torch.from_numpy(bags.sizes[part.bags]).to(device)
                before = self._before(predictor, beside, x, rows, part.bags)
                mu, variance = marginal(predictor, part, x, sizes, before)
                mean[rows], std[rows] = mu.cpu().numpy(), variance.sqrt().cpu().numpy()
        require_numbers(mean, std)
        return self._of_instances(bags, mean, std, beside)

    def _beside(self, bags: Bags, device: torch.device) -> Beside:
        seen = self._seen(device)
        if seen is None:
            self._say_once([UNKNOWN] if self.learns_range else [])
        with torch.no_grad():
            return Beside(self._predictor(device), bags, seen)

    def _of_instances(
        self, bags: Bags, mean: np.ndarray, std: np.ndarray, beside: Beside | None
    ) -> InstancePredictions:
        # p(h_i = 1) = Phi(mu_i / sqrt(S_ii))
        found = InstancePredictions(ndtr(mean / std), mean, std, bags)
        if beside is None:
            return found
        return replace(found, doubt=beside.doubt, novelty=beside.novelty[0])

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(all instances negative) of each bag, and an estimate of its error (eq. pred_bag).

        Deterministic, and never minus infinity or zero; see `gpmil.moments.orthant`.
        """
        found = self._said(self._check_predictable(bags), resolve_device(self.device))
        return found[0], found[1]

    def predict_evidence(
        self, bags, *, log_proba_negative: Float[np.ndarray, " B"] | None = None
    ) -> SlideEvidence:
        """How much of each bag's log odds comes from patches, and how much from the whole slide.

        `patches` are the log odds that the bag would have if its slide context were that of the
        average training slide, at the same variances; `slide` is the rest. Their sum is the log
        odds before any calibration. A large `slide` may be stain or site as well as disease.
        `log_proba_negative`, where it is known already, saves half of the work.
        """
        bags, device = self._check_predictable(bags), resolve_device(self.device)
        log_p = log_proba_negative
        total = log_odds(self._said(bags, device)[0] if log_p is None else np.asarray(log_p))
        if self.slide_context_ == 0:
            return SlideEvidence(total, np.zeros(len(bags)))
        alone = [
            (voice, voice._predictor(device).at_level(voice.slide_context_level_))
            for voice in self._voices()
        ]
        patches = log_odds(pooled([v._slides(bags, device, one)[0] for v, one in alone]))
        return SlideEvidence(patches, total - patches)

    def predict_all(
        self,
        bags,
        *,
        rate: float = 0.1,
        within: str = "bag",
        weights: str = "patch",
        level: float | None = None,
        interval_size: int | None = None,
    ) -> Predictions:
        """Bags and instances from one pass, cheaper than one for each.

        `rate`, `within` and `weights` as in `predict_instances`. Of a model fitted with flags=True,
        instances have `unlike`, too, where `gpmil.decide.unlike` supports it. With `level` also
        the interval of `predict_interval`, for bags of at most `interval_size` instances.
        """
        bags, marks = self._check_predictable(bags), Marks(rate, within, weights)
        below = None if level is None else calibration.tails(level)[0]
        device = resolve_device(self.device)
        beside = self._beside(bags, device)
        log_p, error, mean, std, own = self._said(bags, device, beside)
        interval = np.full((len(bags), 2), np.nan)
        if below is not None:
            most = np.inf if interval_size is None else interval_size
            interval = self._interval(bags, bags.sizes <= most, below, device)
        instances = self._marked(self._of_instances(bags, mean, std, beside), marks)
        found = self._predictions(log_p, error, instances, interval)
        if self.cross_fit_ is not None:
            instances = self.cross_fit_.in_bags(instances, -np.expm1(own), found.proba[:, 1])
        return replace(found, instances=instances, novelty=beside.novelty[1])

    def _calibrate(self, log_p: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        if self.cross_fit_ is None or self.cross_fit_.calibrator is None:
            return log_p
        p = self.cross_fit_.calibrator.predict(log_odds(log_p))
        return np.log1p(-p)

    def refer_rule(self, alpha: float, delta: float = 0.1) -> ReferRule:
        """When a slide may be accepted without a second look: error at most alpha among those.

        With probability 1 - delta; from out-of-fold predictions of the training bags, patients
        as units where the bags had groups.
        `rule.decide(model.predict_proba(bags)[:, 1], model.predict_novelty(bags))`.
        """
        check_is_fitted(self)
        share("alpha", alpha)
        share("delta", delta)
        if self.cross_fit_ is None or self.cross_fit_.calibrator is None:
            raise ValueError(
                "refer_rule needs out-of-fold predictions: fit the model with calibrated=True."
            )
        known = self.cross_fit_
        grouped = len(np.unique(known.groups)) < len(known.groups)
        groups = known.groups if grouped else None
        return ReferRule.fit(known.probability(), known.labels, alpha, delta, groups)

    def predict_interval(
        self, bags, *, level: float = 0.9, n_draws: int | None = None, base_rate: bool = True
    ) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """Where P(y = 1) lies with probability `level`, of all that more bags could still change.

        That is the process, u drawn from q(u), and the level of all log odds, which settings and
        calibration have from a few bags; `base_rate=False` leaves the level as it is: the interval
        of P(y = 1 | u). Intervals at .9 hold the truth in half to two thirds of drawn bags (proof).

        Both ends come from the log odds expanded to second order at u that are likely there: no
        draws, a few times the cost of the prediction. On a CPU bags of more than 5,000 instances
        are expanded once, at the mean of q(u). `n_draws` draws u in place of that, slowly.
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
        low, high = self._probable(ends, below if base_rate else None).T
        return low, high

    def _probable(
        self, ends: Float[np.ndarray, "B 2"], below: float | None
    ) -> Float[np.ndarray, "B 2"]:
        """From log odds given u; wider by what is not known of their level, unless it is."""
        half = 0.0 if below is None else -ndtri(below) * self._level_deviation()
        return expit(calibration.widened(ends, half))

    def _interval(
        self, bags: Bags, wanted: Bool[np.ndarray, " B"], below: float, device: torch.device
    ) -> Float[np.ndarray, "B 2"]:
        """The ends of `predict_interval`; nan for others."""
        return self._probable(self._ends(bags, wanted, below, device), below)

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
        large = _too_large(bags, device)
        ends = np.full((len(bags), 2), np.nan)
        with torch.no_grad():
            predictor, q = self._predictor(device), self._posterior(device)
            strength = self._predict_strength(bags)
            for part, x in self._dense(bags, wanted & ~large, strength, device):
                bag = leave_out.padded_bag(predictor.gp, part, x, part.mask[:, 0])
                ends[part.bags] = np.stack(dense_ends(bag, q, self.mean_, below), 1)
            for b in np.flatnonzero(wanted & large):
                ends[b] = self._large_ends(bags[int(b)], predictor, strength, below)
        return ends

    def _dense(
        self, bags: Bags, which: Bool[np.ndarray, " B"], strength: float, device: torch.device
    ) -> Iterator[tuple[Dense, Float[torch.Tensor, "n d"]]]:
        """Some bags in padded batches, each with the kernel inputs of its instances."""
        numbers = np.flatnonzero(which)
        for part in dense_parts(bags.adjacency, bags.offsets, numbers, strength, device):
            yield part, self._inputs(bags.features[part.rows.cpu().numpy()], device)

    def _large_ends(
        self, bag: Bags, predictor: Predictor, strength: float, below: float
    ) -> tuple[float, float]:
        """The same for one bag too large for dense matrices on the CPU."""
        (part,) = parts(bag.adjacency, bag.offsets, strength)
        x, gp = self._inputs(bag.features, CPU), predictor.gp
        W = gp.whiten_bags(x)
        PG = self._posterior(CPU).shrink(W).mT
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
            *_residual(gp, x, W),
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
            gp, q = self._gp(device), self._posterior(device)
            noise = np.random.default_rng(0).standard_normal((len(q.w), n_draws))
            # w ~ N(w, R^-1)
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

    def _voices(self) -> list["FittedGP"]:
        """Models whose probabilities of a slide are averaged: this one, where it keeps no other."""
        return [self]

    def _said(
        self, bags: Bags, device: torch.device, beside: Beside | None = None
    ) -> tuple[np.ndarray, ...]:
        """As `_slides`, with the average over the voices for slides; last what patches imply."""
        _, *others = self._voices()
        own = self._slides(bags, device, beside=beside)
        found = [own, *(voice._slides(bags, device) for voice in others)]
        error = np.max([one[1] for one in found], axis=0)
        return pooled([one[0] for one in found]), error, *own[2:], own[0]

    def _slides(
        self,
        bags: Bags,
        device: torch.device,
        predictor: Predictor | None = None,
        beside: Beside | None = None,
    ) -> tuple[np.ndarray, ...]:
        """log P(all negative) and its error per bag; mean and deviation of m* per instance."""
        strength = self._predict_strength(bags)
        log_p, error = np.empty(len(bags)), np.empty(len(bags))
        mean, std = np.empty(bags.n_instances), np.empty(bags.n_instances)
        large = _too_large(bags, device)
        with torch.no_grad():
            predictor = predictor or (beside and beside.predictor) or self._predictor(device)
            for part, x in self._dense(bags, ~large, strength, device):
                rows = part.rows.cpu().numpy()
                before = self._before(predictor, beside, x, rows, part.bags)
                mu, S = joint(predictor, part, x, before)
                require_numbers(mu, S)
                found = orthant.log_orthant(mu, S, part.mask, effect=predictor.gp.effect)
                sd = S.diagonal(dim1=-2, dim2=-1).sqrt()
                log_p[part.bags], error[part.bags] = (
                    a.cpu().numpy() for a in (found.log_p, found.error)
                )
                mean[rows], std[rows] = (a[part.mask].cpu().numpy() for a in (mu, sd))
            for b in np.flatnonzero(large):
                own = slice(bags.offsets[b], bags.offsets[b + 1])
                x, rows = self._inputs(bags.features[own], CPU), np.arange(own.start, own.stop)
                before = self._before(predictor, beside, x, rows, np.array([b]))
                log_p[b], error[b], mean[own], std[own] = self._large_bag(
                    bags[int(b)], x, before, predictor, strength
                )
        return log_p, error, mean, std

    @staticmethod
    def _before(
        predictor: Predictor, beside: Beside | None, x: torch.Tensor, *which: np.ndarray
    ) -> Float[torch.Tensor, "n r1"]:
        return predictor.unsmoothed(x) if beside is None else beside.unsmoothed(x, *which)

    def _large_bag(
        self,
        bag: Bags,
        x: torch.Tensor,
        before: torch.Tensor,
        predictor: Predictor,
        strength: float,
    ) -> tuple:
        """The same for one bag too large for dense matrices on the CPU."""
        (part,) = parts(bag.adjacency, bag.offsets, strength)
        mean, variance = torch.empty(len(x)).double(), torch.empty(len(x)).double()
        rows = part.rows
        found = marginal(predictor, part, x[rows], unsmoothed=before[rows])
        mean[rows], variance[rows] = found
        require_numbers(mean, variance)
        gp, q = predictor.gp, self._posterior(CPU)
        W = gp.whiten_bags(x)
        precision = sparse_precision(bag.adjacency, strength)
        F, rest = q.shrink(W).mT, _residual(gp, x, W)
        result = log_orthant_large(mean, variance, precision, F, *rest, effect=gp.effect)
        std = variance.sqrt().numpy()
        return float(result.log_p[0]), float(result.error[0]), mean.numpy(), std

    def _predict_strength(self, bags: Bags) -> float:
        if self.coupling_ > 0 and not bags.has_geometry:
            logger.warning(
                "these bags have neither coordinates nor edges: their instances are predicted "
                "uncoupled, though the model was fitted with coupling %g.",
                self.coupling_,
            )
        return self.coupling_
