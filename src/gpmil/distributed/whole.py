"""A cohort in one place: one partition, asked for the same things as partitions elsewhere.

What partitions elsewhere send as sums is at hand here, so that the solver gets the pieces
themselves and k-means the rows.
"""

import functools
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from gpmil.coupling.operator import instance_rows
from gpmil.data.bags import Bags
from gpmil.distributed.facts import Facts
from gpmil.distributed.partition import Partition, Plan
from gpmil.inference import leave_out, leave_patients
from gpmil.inference import solvers as inference
from gpmil.inference.extended import Kept
from gpmil.inference.solvers import Problem
from gpmil.inference.stores import Gathered
from gpmil.process import features, inducing
from gpmil.process.features import FeatureMap
from gpmil.process.lesion_points import Suspects
from gpmil.process.novelty import MOST_PATCHES, MOST_SLIDES, Seen, evenly
from gpmil.process.sparse_gp import Posterior, SparseGP


class WholeCohort:
    """All bags of a fit on one machine; what a fit asks of it is as in `Cohort`."""

    def __init__(
        self, bags: Bags, device: torch.device, labels: Int[np.ndarray, " B"] | None = None
    ):
        self.bags, self.partition = bags, Partition(bags, device=str(device))
        self.partition.bags = bags  # looked at already: a file is not read for that again
        self._plan: Plan | None = None
        if labels is not None:
            self.take_labels(labels)

    @functools.cached_property
    def whole(self) -> Facts:
        """What is known of the bags without their features."""
        return Facts.of(self.bags)

    def take_labels(self, labels: Int[np.ndarray, " B"]) -> None:
        """Which bags are positive."""
        self.partition.take_labels(labels == 1)

    def labelled_patches(self) -> Float[np.ndarray, "k D"]:
        """Features of the patches of positive bags whose labels are known, in order."""
        return self.partition.labelled_patches()

    def feature_map(self, n_components: int | None, standardize: bool) -> FeatureMap:
        """The way from features to kernel inputs; missing values are found on it."""
        try:
            return features.fitted(self.partition.rows, n_components, standardize)
        except (ValueError, RuntimeError):  # RuntimeError: no eigenvectors of NaN
            self.bags.check_finite()
            raise

    def kmeans_by_class(
        self, labels: Int[np.ndarray, " B"], feature_map: FeatureMap, n_inducing: int, seed: int,
        device: torch.device,
    ) -> Float[np.ndarray, "M D"]:  # fmt: skip
        """Inducing points, half in positive and half in negative bags."""
        positive = np.repeat(labels == 1, self.bags.sizes)
        rows = self.partition.rows
        return inducing.kmeans_by_class(rows, positive, feature_map, n_inducing, seed, device)

    def slide_means(self, feature_map: FeatureMap) -> Float[Tensor, "B d"]:
        """The mean kernel inputs of every bag."""
        return self.partition.slide_means(feature_map)

    def seen(
        self, chosen: Int[np.ndarray, " b"], most: int, feature_map: FeatureMap, gp: SparseGP,
        patient: Int[np.ndarray, " b"],
    ) -> Seen:  # fmt: skip
        """What novelty learns from some bags."""
        own = self.partition
        own.look_at((0, chosen), most, feature_map, gp)
        found = own.judged_at_once(patient)
        return found or Seen.learn(lambda what, *args: [own.looked(what, *args)], patient)

    def some_bags(self, chosen: Int[np.ndarray, " b"]) -> Bags:
        """What settings are learned from."""
        return self.bags[chosen]

    def keep(self, kept: Kept | None) -> None:
        """Keep W and H beyond a problem; `kept` are those of an earlier one of these bags."""
        self.partition.keeps, self.partition.kept = True, kept

    @property
    def kept(self) -> Kept | None:
        """W and H of the last problem, where they are kept."""
        return self.partition.kept

    def problem(self, plan: Plan, c: float, device: torch.device) -> Problem:
        """The training cohort as inference sees it."""
        self._plan = plan
        # a GPU computes these rows again in less time than it takes to see them
        if device.type == "cpu":
            self.partition.watch(evenly(len(self.bags), MOST_SLIDES), MOST_PATCHES)
        gram, trace = self.partition.gather(plan)
        found = Gathered(gram.to(device), trace)
        return inference.assemble(self.partition.pieces, found, c, self.bags.n_instances)

    def take_grades(
        self, problem: Problem, codes: Int[np.ndarray, " B"], cuts: Float[np.ndarray, " k"]
    ) -> Problem:
        """The last problem with all that the grades of the bags say."""
        self.partition.take_grades(codes, cuts)
        return replace(problem, chunks=self.partition.pieces)

    def leave_one_bag_out(
        self,
        problem: Problem,
        w: Float[Tensor, " M"],
        direct: bool,
        score: leave_out.Score = leave_out.scores,
    ) -> Float[np.ndarray, " B"]:
        """log p(y_b) of every bag under the fit without it."""
        at, mean = inference.without_each_bag(problem, w, direct)
        return self.partition.leave_out(at, mean, score).numpy()

    def leave_one_label_out(
        self, problem: Problem, w: Float[Tensor, " M"], direct: bool
    ) -> Float[np.ndarray, " N"]:
        """log p of every known label of a patch without it: the bag is taken out of the fit, then
        what else is known of it counts again; nan where no label is known."""
        out = np.full(self.bags.n_instances, np.nan)
        at, mean = inference.without_each_bag(problem, w, direct)
        known = self.bags.instance_labels >= 0
        chosen = np.unique(self.bags.bag_index[known])
        for numbers, bag in self.partition.padded(chosen):
            found = leave_out.scores_without(bag, at, mean, leave_out.patch_scores)
            out[instance_rows(self.bags.offsets, numbers)] = found[bag.mask].cpu().numpy()
        return out

    def leave_one_group_out(
        self,
        problem: Problem,
        w: Float[Tensor, " M"],
        direct: bool,
        groups: Shaped[np.ndarray, " B"],
        score: leave_out.Score = leave_out.scores,
    ) -> Float[np.ndarray, " B"]:
        """log p(y_b) of every bag under the fit without any bag of its group."""

        def alone(chosen: Int[np.ndarray, " k"]) -> Problem:
            assert self._plan is not None and self.partition.positive is not None
            some = WholeCohort(self.bags[chosen], self.partition.device)
            some.partition.take_labels(self.partition.positive[chosen])
            return some.problem(self._plan, problem.c, problem.R.device)

        padded = self.partition.padded
        found = leave_patients.leave_one_group_out(problem, padded, alone, groups, w, direct, score)
        return found.cpu().numpy()

    def suspects(self, q: Posterior, c: float) -> Suspects:
        """Patches of positive bags where inducing points may be wanted, after a first fit."""
        return self.partition.suspects(q.w, q.R, c)
