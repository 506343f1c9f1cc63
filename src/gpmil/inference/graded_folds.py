"""Grades of bags under fits that have not seen them: what settings and cut points are judged by.

As objective.py has it for two classes: the cohort is cut into folds, patients whole, and w_k is
really fitted to the grades of the other folds. A Newton step from the fit of all bags stays near a
maximum that the bags left out helped to choose. P(Y_b = k) = Q(b_k+1) - Q(b_k), with
Q(b) = P(all m < b) by one_factor.py, its loadings for patches about the lower of the two.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.inference import fold_grams, objective
from gpmil.inference import solvers as inference
from gpmil.inference.at_settings import Features, Settings, Theta, features, theta_of
from gpmil.inference.folded_cohort import Cohort
from gpmil.inference.objective import Fits
from gpmil.inference.pieces import Chunk
from gpmil.inference.solvers import Problem
from gpmil.moments import one_factor
from gpmil.moments.grades import graded
from gpmil.moments.truncated import log_not

TOLERANCE = 1e-5  # of fits that are only judged
STEPS = 100
LEAST = -1e-9  # log Q(b_k) - log Q(b_k+1), two sums: never above


class At(NamedTuple):
    """The cohort at some settings, which cut points leave alone."""

    settings: Settings
    theta: Theta
    made: Features
    R: Float[Tensor, "k M M"]


@dataclass
class GradedFolds:
    """A cohort in folds with the grade of every bag; the last fits warm the next ones."""

    cohort: Cohort
    codes: Int[np.ndarray, " B"]
    w: list[Tensor] | None = None
    made: At | None = None
    fitted: list[Problem] | None = None  # the last ones
    curvature: list[Tensor] | None = None  # minus the Hessian there, once it was needed

    def scores(self, settings: Settings, cuts: Float[np.ndarray, " k"]) -> Float[np.ndarray, " B"]:
        """log P(Y_b) of every bag under the fit without its fold."""
        with torch.no_grad():
            at = self._at(settings)
            problems = self._problems(at, cuts)
            self._fit(problems)
            assert self.w is not None
            return self._judged(at, problems, self.w, cuts)

    def nearby(self, settings: Settings, cuts: Float[np.ndarray, " k"]) -> Float[np.ndarray, " B"]:
        """The same at numbers near the last ones, w from one step with the Hessian of those.

        With g_k(w_k) = 0 there and J_k = -dg_k/dw_k, w_k + J_k^-1 g_k is right to first order.
        """
        with torch.no_grad():
            assert self.w is not None and self.fitted is not None
            if self.curvature is None:
                found = zip(self.fitted, self.w, strict=True)
                self.curvature = [inference.collapsed_bound(p, w)[2] for p, w in found]
            at = self._made(settings)
            problems = self._problems(at, cuts)
            w = [
                w + inference.ascent(J, inference.rise(problem, w)[1])
                for problem, w, J in zip(problems, self.w, self.curvature, strict=True)
            ]
            return self._judged(at, problems, w, cuts)

    def _judged(
        self, at: At, problems: list[Problem], w: list[Tensor], cuts: np.ndarray
    ) -> Float[np.ndarray, " B"]:
        cohort = self.cohort
        inverse = torch.stack([torch.cholesky_inverse(p.chol_R) for p in problems])
        prior = objective.prior_of(cohort, at.theta)
        fits = Fits(torch.stack(w), inverse, inverse, prior)
        m = objective.latent(cohort, at.theta, at.made, fits)
        code = torch.from_numpy(self.codes).to(cohort.device)
        ends = torch.from_numpy(np.concatenate([cuts, [np.inf]])).to(cohort.device)
        # the cut that a bag has passed; one of the lowest grade has not passed the first
        low, high = ends[(code - 1).clamp(min=0)], ends[code]
        u = objective.loadings(cohort, at.theta, at.made, m, m.mu - low[cohort.row])

        def log_below(cut: Float[Tensor, " B"], some_above: bool) -> Float[Tensor, " B"]:
            signs = torch.full_like(cohort.labels, some_above)
            return one_factor.log_labels(
                m.mu - cut[cohort.row], m.variance, u, cohort.starts, signs
            )

        top = len(cuts)
        log_low, above = log_below(low, False), log_below(low, True)
        log_high = log_below(torch.where(code < top, high, low), False)
        between = log_high + log_not((log_low - log_high).clamp(max=LEAST))
        found = torch.where(code == 0, log_low, torch.where(code == top, above, between))
        return found.cpu().numpy()

    def largest(self, settings: Settings, cuts: Float[np.ndarray, " k"]) -> Float[np.ndarray, " B"]:
        """Of every bag the largest mean of its patches under the fit without its fold."""
        with torch.no_grad():
            at = self._at(settings)
            self._fit(self._problems(at, cuts))
            assert self.w is not None
            own = zip(self.cohort.by_fold(at.made.H), self.w, strict=True)
            mu = self.cohort.placed([H @ w for H, w in own])
        return np.maximum.reduceat((at.theta.mean + mu).cpu().numpy(), self.cohort.offsets[:-1])

    def _at(self, settings: Settings) -> At:
        """Kept for the last settings."""
        self.made = self._made(settings)
        return self.made

    def _made(self, settings: Settings) -> At:
        if self.made is not None and self.made.settings == settings:
            return self.made
        theta = theta_of(settings, self.cohort.device)
        made = features(self.cohort, theta)
        return At(settings, theta, made, fold_grams.precisions(self.cohort, theta, made))

    def _problems(self, at: At, cuts: Float[np.ndarray, " k"]) -> list[Problem]:
        """The problem of all bags but those of each fold."""
        made, tau, c = at.made, float(at.theta.slide_effect), float(at.theta.mean)
        levels = torch.from_numpy(cuts).to(self.cohort.device)
        problems = []
        for k, (others, R) in enumerate(zip(self.cohort.others, at.R, strict=True)):
            group = objective.group_of(others, made.noise[others.rows].sqrt(), tau)
            grade = torch.from_numpy(self.codes[self.cohort.fold != k]).to(self.cohort.device)
            chunk = Chunk(made.H[others.rows], graded(group, grade, levels))
            problems.append(Problem([chunk], R, torch.linalg.cholesky(R), c, len(chunk.H), 0.0))
        return problems

    def _fit(self, problems: list[Problem]) -> None:
        """The fit without each fold, from the last one."""
        starts = [None] * len(problems) if self.w is None else self.w
        self.w = [
            inference.direct(problem, STEPS, TOLERANCE, start).w
            for problem, start in zip(problems, starts, strict=True)
        ]
        self.fitted, self.curvature = problems, None
