"""The steps of a fit over partitions: every sum that one machine takes, taken over all of them.

The coordinator runs the solvers of inference.py on a problem with a single piece, `RemotePiece`,
whose sums are those of all partitions in order. k-means looks at the same sample of the whole
cohort, feature statistics are sums about one point: the fit is that of one machine, but for the
order in which numbers are added.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.data import extraction
from gpmil.data.bags import Bags
from gpmil.distributed.cluster import Cluster
from gpmil.distributed.facts import Facts
from gpmil.distributed.partition import BagExcerpt, Plan
from gpmil.inference import solvers as inference
from gpmil.inference.leave_out import Optimum
from gpmil.inference.solvers import Problem
from gpmil.inference.stores import Gathered
from gpmil.moments.likelihood import Traits
from gpmil.moments.logistic import Process, State
from gpmil.process import features, inducing
from gpmil.process.features import FeatureMap
from gpmil.process.lesion_points import Suspects, foremost
from gpmil.process.novelty import Seen
from gpmil.process.sparse_gp import Posterior, SparseGP

logger = logging.getLogger("gpmil")
T = TypeVar("T")


@dataclass(frozen=True)
class Cohort:
    """The partitions with what is known of their bags."""

    bags = None  # they lie elsewhere
    cluster: Cluster
    parts: list[Facts]
    whole: Facts

    @classmethod
    def meet(cls, cluster: Cluster) -> "Cohort":
        """Ask every partition what it has, and check that they belong together."""
        parts = cluster.map("facts")
        return cls(cluster, parts, joined(parts))

    def take_labels(self, labels: Int[np.ndarray, " B"]) -> None:
        """Tell every partition which of its bags are positive."""
        self.cluster.tell("take_labels", each=self.by_bags(labels == 1))

    def labelled_patches(self) -> Float[np.ndarray, "k D"]:
        """Features of the patches of positive bags whose labels are known, in order."""
        return np.concatenate(self.cluster.map("labelled_patches"))

    def by_bags(self, values: np.ndarray) -> list[np.ndarray]:
        """One piece per partition of something that has one value per bag."""
        return _cut(values, [len(part) for part in self.parts])

    # --- Features and inducing points ---------------------------------------------------------

    def feature_map(self, n_components: int | None, standardize: bool) -> FeatureMap:
        """As `features.fitted`."""
        if n_components is None and not standardize:
            return features.identity(self.whole.n_features)
        largest = min(self.whole.n_instances, self.whole.n_features)
        if n_components is not None and not 1 <= n_components <= largest:
            raise ValueError(
                f"n_components must be between 1 and {largest} (the smaller of "
                f"{self.whole.n_instances} instances and {self.whole.n_features} features), got "
                f"{n_components}."
            )
        about = self.cluster.map("start")[0]
        found = _added(features.add, self.cluster.map("feature_sums", about, bool(n_components)))
        if n_components is not None:
            return features.pca_from(found, about, n_components)
        return features.standardizer_from(found, about)

    def kmeans_by_class(
        self, labels: Int[np.ndarray, " B"], feature_map: FeatureMap, n_inducing: int, seed: int,
        device: torch.device,
    ) -> Float[np.ndarray, "M D"]:  # fmt: skip
        """As `inducing.kmeans_by_class`."""
        counts = {
            name: [
                int(part.sizes[mine == positive].sum())
                for part, mine in zip(self.parts, self.by_bags(labels == 1))
            ]
            for name, positive in (("positive", True), ("negative", False))
        }
        wanted = inducing.shares(n_inducing, {name: sum(n) for name, n in counts.items()})
        centres = []
        for name, sizes in counts.items():
            chosen = _local(inducing.sample(sum(sizes), wanted[name], seed), sizes)
            self.cluster.tell("take_sample", name == "positive", feature_map, each=chosen)
            centres.append(self._kmeans([len(c) for c in chosen], wanted[name], seed, device))
        self.cluster.untell("take_sample")
        return feature_map.inverse(np.concatenate(centres))

    def _kmeans(
        self, sizes: list[int], k: int, seed: int, device: torch.device
    ) -> Float[np.ndarray, "m d"]:
        """As `inducing.kmeans`, of the samples that the partitions hold."""
        n = sum(sizes)
        if n <= k:
            return self._points(np.arange(n), sizes).numpy()

        def every(centres: Float[Tensor, "k d"]) -> inducing.Tally:
            found = _added(inducing.merge, self.cluster.map("tally", centres.cpu(), origin))
            return inducing.Tally(*(x.to(device) for x in found))

        few = self._points(inducing.seed_points(n, k, seed), sizes)
        origin = few.mean(0)
        centres = inducing.seeds((few - origin).to(device), k, seed)
        centres = inducing.lloyd(every, centres, sum(self.cluster.map("square", origin)))
        return inducing.distinct((centres.cpu() + origin).numpy())

    def _points(self, which: Int[np.ndarray, " m"], sizes: list[int]) -> Float[Tensor, "m d"]:
        return torch.cat(self.cluster.map("points", each=_local(which, sizes)))

    def slide_means(self, feature_map: FeatureMap) -> Float[Tensor, "B d"]:
        """The mean kernel inputs of every bag, each from where its patches lie."""
        return torch.cat(self.cluster.map("slide_means", feature_map))

    def seen(
        self, chosen: Int[np.ndarray, " b"], most: int, feature_map: FeatureMap, gp: SparseGP,
        patient: Int[np.ndarray, " b"],
    ) -> Seen:  # fmt: skip
        """What novelty learns from some bags; the points are the first of the fit's."""
        which = _local(chosen, [len(part) for part in self.parts])
        starts = np.cumsum([0, *(len(own) for own in which)])[:-1].tolist()
        m = len(gp.inducing)
        self.cluster.tell("look_at", most, feature_map, m, each=list(zip(starts, which)))
        found = Seen.learn(functools.partial(self.cluster.map, "looked"), patient)
        self.cluster.untell("look_at")
        return found

    # --- Inference ----------------------------------------------------------------------------

    def problem(self, plan: Plan, c: float, device: torch.device) -> Problem:
        """As `inference.prepare`."""
        found = self.cluster.tell("gather", plan)
        gram = functools.reduce(torch.add, (one.gram for one in found)).to(device)
        trace = sum(one.trace for one in found)
        sizes = [part.n_instances for part in self.parts]
        anew = plan.store == "recompute"
        piece = RemotePiece(self.cluster, sizes, device, RemoteLikelihood.of(self.cluster), anew)
        return inference.assemble([piece], Gathered(gram, trace), c, self.whole.n_instances)

    def take_grades(
        self, problem: Problem, codes: Int[np.ndarray, " B"], cuts: Float[np.ndarray, " k"]
    ) -> Problem:
        """The last problem with all that the grades of the bags say."""
        self.cluster.tell("take_grades", cuts, each=self.by_bags(codes))
        piece: Any = problem.chunks[0]
        likelihood = RemoteLikelihood.of(self.cluster)
        return replace(problem, chunks=[replace(piece, likelihood=likelihood)])

    def leave_one_bag_out(
        self, problem: Problem, w: Float[Tensor, " M"], direct: bool
    ) -> Float[np.ndarray, " B"]:
        """As `inference.leave_one_bag_out`: partitions score their own bags at the common fit."""
        at, mean = inference.without_each_bag(problem, w, direct)
        at = Optimum(at.w.cpu(), at.c, at.R_inverse.cpu(), at.J_inverse.cpu())
        return torch.cat(self.cluster.map("leave_out", at, mean)).numpy()

    def suspects(self, q: Posterior, c: float) -> Suspects:
        """Patches of positive bags where inducing points may be wanted, after a first fit."""
        return foremost(self.cluster.map("suspects", q.w.cpu(), q.R.cpu(), c))

    # --- A few bags, here ---------------------------------------------------------------------

    def some_bags(self, chosen: Int[np.ndarray, " b"]) -> Bags:
        """Some bags with their features, in order: what settings are learned from."""
        which = _local(chosen, [len(part) for part in self.parts])
        found: list[BagExcerpt] = self.cluster.map("some", each=which)
        x = np.concatenate([some.features for some in found])
        logger.info(
            "settings are learned here: %d of %d bags came with their features, %.2f GB",
            len(chosen), len(self.whole), 1e-9 * x.nbytes,
        )  # fmt: skip
        sizes = np.concatenate([some.sizes for some in found])
        return Bags(
            x,
            np.concatenate([[0], np.cumsum(sizes)]),
            adjacency=sp.block_diag([some.adjacency for some in found], format="csr")
            if self.whole.has_geometry
            else None,
            graph=self.whole.graph,
            instance_labels=np.concatenate([some.known for some in found]),
        )


@dataclass
class RemoteLikelihood(Traits):
    """What a fit must know of the likelihood of bags that lie in partitions."""

    cluster: Cluster
    moments_are_gradient: bool
    leaves_out: bool
    roughness: float

    @classmethod
    def of(cls, cluster: Cluster) -> "RemoteLikelihood":
        """What the partitions say of theirs."""
        gradient, leaves_out, rough = zip(*cluster.map("traits"), strict=True)
        return cls(cluster, any(gradient), all(leaves_out), sum(rough))

    @property
    def unsettled(self) -> int:
        """Bags whose expectation propagation has not converged."""
        return sum(self.cluster.map("unsettled"))


@dataclass(frozen=True)
class RemotePiece:
    """The one piece of a problem whose bags lie in partitions."""

    cluster: Cluster
    sizes: list[int]  # instances of each partition
    device: torch.device  # of the solver
    likelihood: RemoteLikelihood
    anew: bool = False  # whether partitions compute H for every pass

    def pull(self, w: Tensor, c: float) -> Any:
        """As `Chunk.pull`, over all partitions; so are the others."""
        return self._summed("pull", w.cpu(), c)

    def rise(self, w: Tensor, c: float) -> Any:
        """sum_b log Z_b and its gradient."""
        return self._summed("rise", w.cpu(), c)

    def four_slopes(self, w: Tensor, c: float) -> Any:
        """The gradients of `rise` at four w, added up."""
        return self._summed("four_slopes", w.cpu(), c)

    def fixed_point(self, w: Tensor, c: float) -> Any:
        """sum_b log Z_b, W'(E - c) and W'D H."""
        return self._summed("fixed_point", w.cpu(), c)

    def bound(self, w: Tensor, c: float) -> Any:
        """sum_b log Z_b, its gradient and minus its Hessian."""
        return self._summed("bound", w.cpu(), c)

    def weigh(self, expectation: Tensor, c: float) -> Any:
        """W'(E - c); every partition gets the E[m] of its own instances."""
        return self._summed("weigh", c, each=expectation.cpu().split(self.sizes))

    def weigh_signs(self, c: float) -> Any:
        """W'(E - c) for E[m] = 1 in positive bags, -1 in negative ones."""
        return self._summed("weigh_signs", c)

    def gamma(self, w: Tensor, c: float) -> Tensor:
        """d log Z_b / d mu of every instance."""
        return torch.cat(self.cluster.map("gamma", w.cpu(), c)).to(self.device)

    def turn(self, state: State, at: Process | None, c: float) -> Any:
        """A turn of VGPMIL; partitions get the state of their instances, and give it back."""
        at = None if at is None else at.to("cpu")
        parts = state.cpu().split(self.sizes, dim=1)
        *terms, after = zip(*self.cluster.map("turn", at, c, each=parts), strict=True)
        state.copy_(torch.cat(after, dim=1))
        return tuple(_added(torch.add, term).to(self.device) for term in terms)

    def _summed(self, term: str, *args: Any, each: Sequence[Any] | None = None) -> tuple:
        found = _added(_add_all, self.cluster.map("sums", *args, term, each=each))
        return tuple(x.to(self.device) if isinstance(x, Tensor) else x for x in found)


def _add_all(a: tuple, b: tuple) -> tuple:
    return tuple(x + y for x, y in zip(a, b))


def _added(add: Callable[[T, T], T], parts: Sequence[T]) -> T:
    """The sum, in the order of the partitions."""
    return functools.reduce(add, parts)


# --- Partitions that make one cohort ----------------------------------------------------------


def joined(parts: Sequence[Facts]) -> Facts:
    """The facts of all bags; ValueError where partitions do not belong together."""
    for k, part in enumerate(parts):
        if not len(part):
            raise ValueError(
                f"partition {k + 1} of {len(parts)} has no bags. Use fewer partitions (processes), "
                "or check the files it reads."
            )
    _agree(parts, "n_features", "features per instance", "features of another encoder?")
    for name, title in extraction.ONE_PER_COHORT.items():
        said = {k: p.extraction[name] for k, p in enumerate(parts) if name in p.extraction}
        _agree_all(said, f"as {title}", f"extract all features with one {title}")
    _agree(parts, "graph", "as graph", "build all bags with the same graph=, and all with coords")
    _agree(parts, "class_names", "as classes", "name the same positive= everywhere")
    given = [part.y for part in parts if part.y is not None]
    if len(given) not in (0, len(parts)):
        raise ValueError(
            f"y was given for {len(given)} of {len(parts)} partitions: give it for all of them, or "
            "for none and put the labels into the bags."
        )
    first = parts[0]
    return Facts(
        np.concatenate([part.names for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        first.n_features,
        sum(part.n_edges for part in parts),
        first.graph,
        any(part.has_geometry for part in parts),
        first.class_names,
        _said_by_all(parts),
        np.concatenate(given) if given else None,
        _groups_of_all(parts),
    )


def _groups_of_all(parts: Sequence[Facts]) -> np.ndarray | None:
    """The patients of all bags, by name; None where a partition does not know its own."""
    given = [part.groups for part in parts if part.groups is not None]
    if len(given) < len(parts):
        if given:
            logger.warning(
                "%d of %d partitions name the patients (groups) of their bags: learning leaves "
                "out bags, not patients. Give groups= everywhere.",
                len(given), len(parts),
            )  # fmt: skip
        return None
    return np.concatenate([groups.astype(str) for groups in given])


def _said_by_all(parts: Sequence[Facts]) -> dict[str, Any]:
    """How features were extracted; what partitions say differently (an overlap) is left out."""
    found: dict[str, set[Any]] = {}
    for part in parts:
        for name, value in part.extraction.items():
            found.setdefault(name, set()).add(value)
    return {name: found[name].pop() for name in extraction.NAMES if len(found.get(name, ())) == 1}


def _agree(parts: Sequence[Facts], name: str, what: str, advice: str) -> None:
    _agree_all({k: getattr(part, name) for k, part in enumerate(parts)}, what, advice)


def _agree_all(values: dict[int, Any], what: str, advice: str) -> None:
    """One value in all partitions, by their number; those that do not say it are not there."""
    first = next(iter(values), 0)
    for k, value in values.items():
        if value != values[first]:
            raise ValueError(
                f"partitions of one cohort must agree: partition {first + 1} has "
                f"{values[first]!r} {what}, partition {k + 1} has {value!r}. Likely fix: {advice}"
                f"{'' if advice.endswith('?') else '.'}"
            )


def cut(bags: Bags, n: int) -> list[Bags]:
    """At most n partitions of whole bags in order, about equal in instances.

    >>> x = [[[0.0]] * k for k in (3, 1, 1, 1, 2)]
    >>> [part.sizes.tolist() for part in cut(Bags.from_arrays(x), 3)]
    [[3], [1, 1], [1, 2]]
    """
    n = min(n, len(bags))
    ends = [0]
    for k in range(1, n):
        # the bag nearest to k/n of the instances that leaves a bag to every partition
        nearest = int(np.abs(bags.offsets - k * bags.n_instances / n).argmin())
        ends.append(min(max(nearest, ends[-1] + 1), len(bags) - n + k))
    return [bags[first:last] for first, last in pairwise([*ends, len(bags)])]


def _cut(values: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1])


def _local(chosen: Int[np.ndarray, " m"], sizes: list[int]) -> list[Int[np.ndarray, " k"]]:
    """Rising positions in the whole, as positions in each partition.

    >>> _local(np.array([1, 4, 5]), [2, 3, 3])
    [array([1]), array([2]), array([0])]
    """
    ends = np.cumsum(sizes)
    pieces = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    return [piece - start for piece, start in zip(pieces, [0, *ends[:-1]])]
