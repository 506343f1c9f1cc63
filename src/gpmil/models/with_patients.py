"""Patients: the slides of one are negative together or not, and share the process."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Shaped

from gpmil.coupling.operator import parts, sparse_precision
from gpmil.data.bags import Bags
from gpmil.fast.lanes import one_blas_thread
from gpmil.inference import leave_out
from gpmil.models.base import both_classes, log_odds, pooled, resolve_device
from gpmil.models.fitted import LARGE
from gpmil.models.with_intervals import IntervalGP
from gpmil.moments import orthant, orthant_joint
from gpmil.moments.orthant import Expansion
from gpmil.moments.orthant_large import LargeSlide
from gpmil.process.kernels import Kernel
from gpmil.process.slide_context import bag_means
from gpmil.process.sparse_gp import Predictor, marginal

CPU = torch.device("cpu")


@dataclass(frozen=True)
class PatientPredictions:
    """What a model says of patients; arrays in the order of `patients`."""

    patients: Shaped[np.ndarray, " P"]
    slides: Int[np.ndarray, " P"]  # how many each has
    log_proba_negative: Float[np.ndarray, " P"]  # log P(all slides negative)
    error: Float[np.ndarray, " P"]
    log_odds: Float[np.ndarray, " P"]
    proba: Float[np.ndarray, "P 2"]  # P(patient negative) and P(patient positive)
    labels: Int[np.ndarray, " P"]  # 1 where any slide is positive, -1 where that is not known

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per patient."""
        columns = {"patient": self.patients, "slides": self.slides, "probability": self.proba[:, 1]}
        return pd.DataFrame(columns | {"log_odds": self.log_odds, "label": self.labels})


class PatientGP(IntervalGP):
    """A Gaussian-process model that knows what slides of a patient have in common."""

    def _voices(self) -> list["PatientGP"]:
        return [self]

    @one_blas_thread()
    def predict_patients(self, bags) -> PatientPredictions:
        """P(all slides of a patient are negative), jointly; `bags.groups` names the patients.

        The slides share the process (and each has its own coupling, effect and context), so this is
        no product. Of a calibrated model each slide is calibrated, and what they gain together is
        the model's own. A patient of one slide has the slide's probability.
        """
        bags = self._check_predictable(bags)
        if bags.groups is None:
            raise ValueError(
                "predict_patients needs the patient of every bag, these bags have none: give "
                "groups= when building them (--patient on the command line)."
            )
        device = resolve_device(self.device)
        voices = self._voices()
        each = [voice._slides(bags, device)[:2] for voice in voices]
        log_p, error = pooled([e[0] for e in each]), np.max([e[1] for e in each], axis=0)
        own = self._calibrate(log_p)
        patients, number = np.unique(bags.groups, return_inverse=True)
        found = np.empty((len(patients), 2))
        with torch.no_grad():
            for p in range(len(patients)):
                of = np.flatnonzero(number == p)
                found[p] = own[of].sum(), error[of].sum()
                if len(of) > 1:
                    every = [
                        voice._together(bags[of], alone[of], device)
                        for voice, (alone, _) in zip(voices, each)
                    ]
                    together = float(pooled([np.array(one[0]) for one in every]))
                    gained = own[of].sum() + together - log_p[of].sum()
                    off = max(one[1] for one in every)
                    found[p] = min(gained, own[of].min()), off  # P(all) <= P(one)
        labels = _patient_labels(bags.labels, number)
        value = found[:, 0]
        numbers = np.bincount(number), value, found[:, 1], log_odds(value), both_classes(value)
        return PatientPredictions(patients, *numbers, labels)

    def _together(
        self, slides: Bags, log_p: Float[np.ndarray, " b"], device: torch.device
    ) -> tuple[float, float]:
        """log P(all negative) of some slides by the model itself, and its error."""
        each, strength = torch.from_numpy(log_p), self._predict_strength(slides)
        if slides.n_instances > LARGE:
            expanded = [self._expanded(slides[b], strength) for b in range(len(slides))]
            return float(each.sum()) + orthant_joint.gain(expanded), 0.0
        mu, cov = self._joint(slides, strength, device)
        sizes = slides.sizes.tolist()
        return orthant_joint.log_together(mu, cov, sizes, each.to(device))

    def _joint(
        self, slides: Bags, strength: float, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and covariance of m* in all patches of some slides."""
        predictor = self._predictor(device)
        x = self._inputs(slides.features, device)
        sizes = torch.from_numpy(slides.sizes).to(device)
        sigma = self._sigma(slides, strength, device)
        same = torch.block_diag(*(torch.ones(n, n) for n in slides.sizes.tolist())).to(sigma)
        before = predictor.unsmoothed(x)
        K = predictor.gp.kernel(x, x) + predictor.gp.effect**2 * same
        if predictor.gp.context is not None:
            means = bag_means(x, sizes)
            before = before + predictor.of_slides(means).repeat_interleave(sizes, 0)
            K = K + _context_kernel(predictor, means).repeat_interleave(sizes, 0).repeat_interleave(
                sizes, 1
            )
        Y = before[:, 1:]
        # S = Sigma + Sigma (K - Y Y') Sigma, Sigma and tau^2 inside the slides alone
        S = sigma + sigma @ (K - Y @ Y.mT) @ sigma
        return predictor.c + sigma @ before[:, 0], (S + S.mT) / 2

    def _sigma(self, slides: Bags, strength: float, device: torch.device) -> torch.Tensor:
        sigma = torch.zeros(slides.n_instances, slides.n_instances, dtype=torch.float64)
        every = np.ones(len(slides), dtype=bool)
        for part, _ in self._dense(slides, every, strength, device):
            for b, own, mask in zip(part.bags, part.sigma.cpu(), part.mask.cpu()):
                rows = slice(slides.offsets[b], slides.offsets[b + 1])
                sigma[rows, rows] = own[mask][:, mask]
        return sigma.to(device)

    def _expanded(self, bag: Bags, strength: float) -> Expansion:
        """log P of a slide as x moves, w = E[w] + chol(R)^-T x."""
        predictor, q, gp = self._predictor(CPU), self._posterior(CPU), self._gp(CPU)
        x = self._inputs(bag.features, CPU)
        (part,) = parts(bag.adjacency, bag.offsets, strength)
        if len(x) <= LARGE:
            dense, x = next(self._dense(bag, np.ones(1, dtype=bool), strength, CPU))
            one = leave_out.padded_bag(gp, dense, x, dense.mask[:, 0])
            S = one.sigma + one.sigma @ one.K @ one.sigma - one.H @ one.H.mT
            mu, G = self.mean_ + one.H @ q.w, q.shrink(one.H).mT
            return orthant.expand(mu, (S + S.mT) / 2, one.mask, G)
        W = gp.whiten_bags(x)
        PG, rows = q.shrink(W).mT, part.rows
        mean, variance, G = torch.empty(len(x)).double(), torch.empty(len(x)).double(), PG.clone()
        mean[rows], variance[rows] = marginal(predictor, part, x[rows])
        G[rows] = part.apply(PG[rows])
        variance[rows] = (variance - G.square().sum(1))[rows].maximum(part.diagonal())
        residual = gp.kernel.diagonal(x) + gp.shared - W.square().sum(1)
        slide = LargeSlide(
            sparse_precision(bag.adjacency, strength),
            W.new_zeros(len(x), 0),
            lambda i: gp.within(x[i], x) - W[i] @ W.mT,
            residual,
        )
        return slide.expand(mean, variance, PG)


def _context_kernel(predictor: Predictor, means: torch.Tensor) -> torch.Tensor:
    """k_s(z_b, z_b') of slides."""
    context = predictor.gp.context
    assert context is not None
    z = context.frame(means)
    return Kernel("rbf", context.variance, context.lengthscale)(z, z)


def _patient_labels(
    labels: Int[np.ndarray, " B"], number: Int[np.ndarray, " B"]
) -> Int[np.ndarray, " P"]:
    """1 where any slide is, 0 where all are known to be negative, else -1.

    >>> _patient_labels(np.array([0, 1, 0, -1, 0, 1, -1]), np.array([0, 0, 1, 1, 2, 3, 3])).tolist()
    [1, -1, 0, 1]
    """
    most, least = np.full(number.max() + 1, -1), np.full(number.max() + 1, 1)
    np.maximum.at(most, number, labels)
    np.minimum.at(least, number, labels)
    return np.where(most == 1, 1, least)
