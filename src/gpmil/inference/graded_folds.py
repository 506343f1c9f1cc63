"""Grades of bags under fits that have not seen them: what settings and cut points are judged by.

As objective.py has it for two classes: the cohort is cut into folds, patients whole, and w_k is
really fitted to the grades of the other folds. A Newton step from the fit of all bags stays near a
maximum that the bags left out helped to choose.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.inference import leave_grades, leave_out, objective
from gpmil.inference import solvers as inference
from gpmil.inference.folded_cohort import Cohort
from gpmil.inference.objective import Flat, Held, Settings
from gpmil.inference.pieces import Chunk
from gpmil.inference.solvers import Problem
from gpmil.moments.grades import graded
from gpmil.moments.likelihood import Group

TOLERANCE = 1e-5  # of fits that are only judged
STEPS = 100


class Part(NamedTuple):
    """The bags of one fold at some settings, one after the other, and their W'H."""

    bags: Int[np.ndarray, " b"]
    H: Float[Tensor, "n M"]
    group: Group
    gram: Float[Tensor, "M M"]


@dataclass
class GradedFolds:
    """A cohort in folds with the grade of every bag; the last fits warm the next ones."""

    cohort: Cohort
    codes: Int[np.ndarray, " B"]
    w: list[Tensor] | None = None
    made: tuple[Settings, Held, list[Part]] | None = None
    fitted: list[Problem] | None = None  # the last ones
    curvature: list[Tensor] | None = None  # minus the Hessian there, once it was needed

    def scores(self, settings: Settings, cuts: Float[np.ndarray, " k"]) -> Float[np.ndarray, " B"]:
        """log P(Y_b) of every bag under the fit without its fold."""
        with torch.no_grad():
            held, parts = self._at(settings)
            problems = self._problems(held, parts, cuts)
            self._fit(problems)
            assert self.w is not None
            return self._judged(held, problems, self.w, cuts)

    def nearby(self, settings: Settings, cuts: Float[np.ndarray, " k"]) -> Float[np.ndarray, " B"]:
        """The same at numbers near the last ones, w from one step with the Hessian of those.

        With g_k(w_k) = 0 there and J_k = -dg_k/dw_k, w_k + J_k^-1 g_k is right to first order.
        """
        with torch.no_grad():
            assert self.w is not None and self.fitted is not None
            if self.curvature is None:
                found = zip(self.fitted, self.w, strict=True)
                self.curvature = [inference.collapsed_bound(p, w)[2] for p, w in found]
            held, parts = self._made(settings)
            problems = self._problems(held, parts, cuts)
            w = [
                w + inference.ascent(J, inference.rise(problem, w)[1])
                for problem, w, J in zip(problems, self.w, self.curvature, strict=True)
            ]
            return self._judged(held, problems, w, cuts)

    def _judged(
        self, held: Held, problems: list[Problem], w: list[Tensor], cuts: np.ndarray
    ) -> Float[np.ndarray, " B"]:
        out = np.empty(len(self.codes))
        inverse = [torch.cholesky_inverse(p.chol_R) for p in problems]
        for batch in self.cohort.batches():
            bag, k = objective.bag_of(self.cohort, batch, *held), batch.fold
            S = leave_out.covariance_from(bag, bag.H @ inverse[k] @ bag.H.mT)
            mu = held.theta.mean + bag.H @ w[k]
            grade, levels = self._graded(batch.bags, cuts, mu.device)
            out[batch.bags] = leave_grades.scores(bag, mu, S, grade, levels).cpu().numpy()
        return out

    def largest(self, settings: Settings, cuts: Float[np.ndarray, " k"]) -> Float[np.ndarray, " B"]:
        """Of every bag the largest mean of its patches under the fit without its fold."""
        with torch.no_grad():
            held, parts = self._at(settings)
            self._fit(self._problems(held, parts, cuts))
            assert self.w is not None
            out = np.empty(len(self.codes))
            for part, w in zip(parts, self.w, strict=True):
                mu = (held.theta.mean + part.H @ w).cpu().numpy()
                starts = part.group.offsets[:-1].cpu().numpy()
                out[part.bags] = np.maximum.reduceat(mu, starts)
        return out

    def _at(self, settings: Settings) -> tuple[Held, list[Part]]:
        """H and R, which cut points leave alone: kept for the last settings."""
        if self.made is None or self.made[0] != settings:
            self.made = settings, *self._made(settings)
        return self.made[1:]

    def _made(self, settings: Settings) -> tuple[Held, list[Part]]:
        if self.made is not None and self.made[0] == settings:
            return self.made[1:]
        theta = objective.theta_of(settings, self.cohort.inputs.device)
        held = objective.held_at(self.cohort, theta)
        return held, parts_of(self.cohort, held)

    def _problems(
        self, held: Held, parts: list[Part], cuts: Float[np.ndarray, " k"]
    ) -> list[Problem]:
        """The problem of all bags but those of each fold."""
        chunks = [Chunk(p.H, graded(p.group, *self._graded(p.bags, cuts, p.H.device)))
                  for p in parts]  # fmt: skip
        total = sum(part.gram for part in parts)
        problems = []
        for k, part in enumerate(parts):
            R = torch.eye(len(part.gram)).to(part.gram) + total - part.gram
            R = (R + R.mT) / 2
            others = [chunk for j, chunk in enumerate(chunks) if j != k]
            n = sum(len(chunk.H) for chunk in others)
            factor = torch.linalg.cholesky(R)
            problems.append(Problem(others, R, factor, float(held.theta.mean), n, 0.0))
        return problems

    def _fit(self, problems: list[Problem]) -> None:
        """The fit without each fold, from the last one."""
        starts = [None] * len(problems) if self.w is None else self.w
        self.w = [
            inference.direct(problem, STEPS, TOLERANCE, start).w
            for problem, start in zip(problems, starts, strict=True)
        ]
        self.fitted, self.curvature = problems, None

    def _graded(
        self, bags: Int[np.ndarray, " b"], cuts: np.ndarray, device: torch.device
    ) -> tuple[Int[Tensor, " b"], Float[Tensor, " k"]]:
        return torch.from_numpy(self.codes[bags]).to(device), torch.from_numpy(cuts).to(device)


def parts_of(cohort: Cohort, held: Held) -> list[Part]:
    """H and W'H of every fold."""
    flats: list[list[Flat]] = [[] for _ in range(cohort.n_folds)]
    bags: list[list[np.ndarray]] = [[] for _ in flats]
    gram = [torch.zeros(()) for _ in flats]
    for batch in cohort.batches():
        bag, k = objective.bag_of(cohort, batch, *held, with_K=False), batch.fold
        gram[k] = gram[k].to(bag.H) + bag.W.flatten(0, 1).mT @ bag.H.flatten(0, 1)
        flats[k].append(Flat.of(bag))
        bags[k].append(batch.bags)
    tau = float(held.theta.slide_effect)
    return [
        Part(np.concatenate(own), *_joined(some, tau), G)
        for own, some, G in zip(bags, flats, gram, strict=True)
    ]


def _joined(some: list[Flat], tau: float) -> tuple[Float[Tensor, "n M"], Group]:
    columns = list(zip(*some, strict=True))
    H, deviation, sizes, positive = (torch.cat(column) for column in columns[:4])
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return H, Group(deviation, offsets, positive, None, slice(0, len(H)), effect=tau)
