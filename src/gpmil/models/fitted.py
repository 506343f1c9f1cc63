"""Predictions of a fitted Gaussian-process model: everything that follows from q(u)."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.special import ndtr
from sklearn.utils.validation import check_is_fitted

from gpmil.coupling.operator import Dense, dense_parts, parts, sparse_precision
from gpmil.data.bags import Bags
from gpmil.decide import calibration
from gpmil.decide.refer import ReferRule
from gpmil.fast.lanes import one_blas_thread
from gpmil.models import with_context
from gpmil.models.base import (
    InstancePredictions,
    Predictions,
    log_odds,
    pooled,
    resolve_device,
)
from gpmil.models.beside import Beside
from gpmil.models.checks import number, require_numbers, share
from gpmil.models.cross_fit import Marks
from gpmil.models.saved_checks import Array, or_none, strength, trials
from gpmil.models.with_context import SlideEvidence
from gpmil.models.with_novelty import UNKNOWN
from gpmil.models.with_threshold import DecidingGP
from gpmil.moments import orthant
from gpmil.moments.orthant_large import log_orthant_large
from gpmil.process.sparse_gp import Predictor, SparseGP, joint, marginal

logger = logging.getLogger("gpmil")
CPU = torch.device("cpu")
LARGE = 1500  # instances per bag above which dense matrices cost more than sparse ones on a CPU


def too_large(bags: Bags, device: torch.device) -> Bool[np.ndarray, " B"]:
    """Bags whose dense matrices cost more than sparse ones."""
    return (bags.sizes > LARGE) & (device.type == "cpu")


def residual(
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

    @one_blas_thread()
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

    @one_blas_thread()
    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(all instances negative) of each bag, and an estimate of its error (eq. pred_bag).

        Deterministic, and never minus infinity or zero; see `gpmil.moments.orthant`.
        """
        found = self._said(self._check_predictable(bags), resolve_device(self.device))
        return found[0], found[1]

    @one_blas_thread()
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

    @one_blas_thread()
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
            known = self._calibrate(log_p)
            interval = self._interval(bags, bags.sizes <= most, below, device, known)
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

    def _interval(
        self, bags: Bags, wanted: Bool[np.ndarray, " B"], below: float, device: torch.device,
        log_p: Float[np.ndarray, " B"],
    ) -> Float[np.ndarray, "B 2"]:  # fmt: skip
        """The ends of `predict_interval` about these predictions; nan for others."""
        raise NotImplementedError

    def _dense(
        self, bags: Bags, which: Bool[np.ndarray, " B"], strength: float, device: torch.device
    ) -> Iterator[tuple[Dense, Float[torch.Tensor, "n d"]]]:
        """Some bags in padded batches, each with the kernel inputs of its instances."""
        numbers = np.flatnonzero(which)
        for part in dense_parts(bags.adjacency, bags.offsets, numbers, strength, device):
            yield part, self._inputs(bags.features[part.rows.cpu().numpy()], device)

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
        large = too_large(bags, device)
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
        F, rest = q.shrink(W).mT, residual(gp, x, W)
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
