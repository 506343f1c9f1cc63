"""Some whole bags of a cohort, and what they add to the sums of a fit.

A partition lives where its features are. What it answers with is small: sums over its instances,
the rows that k-means starts from, numbers of its bags. What it was told (labels, a sample, the
plan of a fit) it keeps; where it is lost, it is built again and told again (cluster.py).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpmil.coupling.operator import dense_parts, instance_rows, parts, runs
from gpmil.data.bags import Bags
from gpmil.data.labelled import labelled_rows
from gpmil.distributed.facts import Facts
from gpmil.inference import leave_out
from gpmil.inference.extended import Kept
from gpmil.inference.leave_grades import Grades
from gpmil.inference.leave_out import Bag, Mean, Optimum, Score
from gpmil.inference.pieces import Piece
from gpmil.inference.solvers import Problem, summed
from gpmil.inference.stores import Gathered, Source, gather
from gpmil.moments.likelihood import Family
from gpmil.moments.logistic import Process, State
from gpmil.process import features, inducing, lesion_points, novelty_at_once
from gpmil.process.features import FeatureMap, Sums
from gpmil.process.inducing import Tally
from gpmil.process.kernels import Kernel
from gpmil.process.lesion_points import Suspects
from gpmil.process.novelty import Looked, Seen, Watched, evenly_of_each
from gpmil.process.slide_context import SlideContext, bag_means
from gpmil.process.sparse_gp import Posterior, Predictor, SparseGP, marginal

BagSource = Bags | Callable[[], Bags]


@dataclass(frozen=True)
class Plan:
    """All that a partition needs to know of a fit; L comes along, the same for all of them."""

    feature_map: FeatureMap
    kernel: str | gpytorch.kernels.Kernel
    variance: float
    lengthscale: float
    inducing: Float[Tensor, "M d"]
    L: Float[Tensor, "M M"]
    strength: float
    dtype: torch.dtype
    likelihood: Family
    store: str
    effect: float
    context: SlideContext | None = None
    taught: bool = False  # whether known labels of instances count
    residual: bool = False  # whether the likelihood asks for diag(Kxx - W W')

    def gp(self, device: torch.device) -> SparseGP:
        """The Gaussian process, on a partition's own device."""
        kernel = Kernel(self.kernel, self.variance, self.lengthscale, device)
        context = None if self.context is None else self.context.to(device)
        return SparseGP(kernel, self.inducing.to(device), self.L.to(device), self.effect, context)


class BagExcerpt(NamedTuple):
    """A few bags that travel: those that settings are learned from."""

    features: np.ndarray
    sizes: Int[np.ndarray, " b"]
    adjacency: sp.csr_array
    known: Int[np.ndarray, " n"]  # labels of instances


class Partition:
    """Some bags where they lie; `source` is a Bags, or builds one when it is first needed."""

    def __init__(self, source: BagSource, y: Any = None, device: str | None = None):
        self._source, self._y, self._device = source, y, device
        self.positive: np.ndarray | None = None  # (b,) bool
        self._sample: Tensor | None = None
        self._looked: Looked | None = None
        self._watched: Watched | None = None  # of the last pass, for novelty
        self._plan: Plan | None = None
        self.pieces: Sequence[Piece] = ()
        self._problem: Problem | None = None
        self._grades: Grades | None = None  # of the bags, where there are more than two
        self._watching: tuple[Int[np.ndarray, " b"], int] | None = None  # bags, instances of each
        self.keeps = False  # W and H of the last pass, for the next one
        self.kept: Kept | None = None

    # --- What lies here -----------------------------------------------------------------------

    @functools.cached_property
    def bags(self) -> Bags:
        """The bags."""
        bags = self._source if isinstance(self._source, Bags) else self._source()
        if not isinstance(bags, Bags):
            raise ValueError(
                f"expected gpmil.Bags, or a function without arguments that returns them; it "
                f"returned {type(bags).__name__}. Build bags with gpmil.read or "
                "gpmil.Bags.from_arrays."
            )
        bags.check_finite()
        return bags

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the sums are computed: as asked, or on a GPU where this machine has one."""
        has_gpu = torch.cuda.is_available()
        found = torch.device(self._device or ("cuda" if has_gpu else "cpu"))
        if found.type == "cuda" and not has_gpu:
            raise ValueError(
                f"device={self._device!r} was asked for, but torch sees no GPU on the machine of "
                "this partition. Use device=None or 'cpu', or workers that have one."
            )
        return found

    @functools.cached_property
    def rows(self) -> features.Rows:
        """The features, on the GPU where they fit."""
        return features.on_device(self.bags.features, self.device)

    def facts(self) -> Facts:
        """Names, labels, sizes and so on."""
        y = None if self._y is None else np.asarray(self._y)
        if y is not None and y.shape != (len(self.bags),):
            raise ValueError(
                f"expected one label per bag of this partition, {len(self.bags)} in all; got an "
                f"array of shape {y.shape}."
            )
        return Facts.of(self.bags, y)

    def some(self, which: Int[np.ndarray, " b"]) -> BagExcerpt:
        """Some bags, with their features."""
        bags = self.bags[which]
        x = np.asarray(bags.features)
        return BagExcerpt(x, bags.sizes, bags.adjacency, bags.instance_labels)

    def predict(self, model: Any) -> Any:
        """What a fitted model says of the bags, without the bags."""
        return Predicted.of(model, self.bags)

    # --- Features and inducing points ---------------------------------------------------------

    def take_labels(self, positive: np.ndarray) -> None:
        """Which bags are positive."""
        self.positive = positive

    def labelled_patches(self) -> Float[np.ndarray, "k D"]:
        """Features of the patches of positive bags whose labels are known, in order."""
        assert self.positive is not None
        rows = labelled_rows(self.bags, self.positive.astype(np.int64))
        return np.asarray(self.bags.features[rows], dtype=np.float64)

    def start(self) -> Float[Tensor, " D"]:
        """A point about which sums lose little."""
        return features.start(self.rows).cpu()

    def feature_sums(self, about: Float[Tensor, " D"], outer: bool) -> Sums:
        """Sums over the instances, about a point."""
        found = features.sums(self.rows, about.to(self._sums_device), outer)
        return Sums(found.size, found.first.cpu(), found.second.cpu())

    @property
    def _sums_device(self) -> torch.device:
        return self.rows.device if isinstance(self.rows, Tensor) else torch.device("cpu")

    def slide_means(self, feature_map: FeatureMap) -> Float[Tensor, "b d"]:
        """The mean kernel inputs of every bag, some bags at a time."""
        found = []
        for bags in runs(np.arange(len(self.bags)), self.bags.sizes):
            rows = torch.from_numpy(instance_rows(self.bags.offsets, bags)).to(self.device)
            x = feature_map(features.take(self.rows, rows), self.device)
            sizes = torch.from_numpy(self.bags.sizes[bags]).to(self.device)
            found.append(bag_means(x, sizes).cpu())
        return torch.cat(found)

    def look_at(
        self, which: tuple[int, Int[np.ndarray, " b"]], most: int, feature_map: FeatureMap,
        gp: SparseGP | int,
    ) -> None:  # fmt: skip
        """Keep some bags as novelty sees them, of large ones evenly spaced instances.

        `which` begins with the place of the first one among all. An int means the first so many
        points of the fit.
        """
        start, chosen = which
        gp = self._gp.first(gp) if isinstance(gp, int) else gp
        rows, sizes = self._evenly(chosen, most)
        seen, self._watched = self._watched, None
        if seen is not None and seen.serves(gp, rows):
            W = seen.W[:, : len(gp.L)].contiguous()
            self._looked = Looked.seen(start, W, seen.own, sizes)
            return
        x = feature_map(features.take(self.rows, torch.from_numpy(rows)), self.device)
        self._looked = Looked.at(start, gp, x, sizes)

    def _evenly(self, chosen: Int[np.ndarray, " b"], most: int) -> tuple[np.ndarray, np.ndarray]:
        """Evenly spaced instances of some bags, and how many of each."""
        return evenly_of_each(self.bags.offsets[chosen], self.bags.sizes[chosen], most)

    def watch(self, chosen: Int[np.ndarray, " b"], most: int) -> None:
        """Keep in the next pass what `look_at` will ask for; for a cohort that is all here."""
        self._watching = chosen, most

    def looked(self, what: str, *arguments: Any) -> Any:
        """What novelty asks of these bags; see `Looked`."""
        assert self._looked is not None
        self._looked = self._looked.cpu()
        return getattr(self._looked, what)(*arguments)

    def judged_at_once(self, patient: Int[np.ndarray, " S"]) -> Seen | None:
        """All that novelty learns, where a GPU has it; None: ask for sums."""
        assert self._looked is not None
        if novelty_at_once.serves(self._looked, patient):
            return novelty_at_once.learned(self._looked, patient)
        return None

    def take_sample(
        self, which: Int[np.ndarray, " m"], positive: bool, feature_map: FeatureMap
    ) -> None:
        """Keep the kernel inputs of some instances of a class, for k-means to look at."""
        assert self.positive is not None
        of_class = np.flatnonzero((self.positive == positive)[self.bags.bag_index])
        self._sample = inducing.inputs(self.rows, of_class[which], feature_map, self.device)

    def points(self, which: Int[np.ndarray, " m"]) -> Float[Tensor, "m d"]:
        """Some points of the sample."""
        return self._sampled[torch.from_numpy(which).to(self.device)].cpu()

    def square(self, origin: Float[Tensor, " d"]) -> float:
        """Sum of |x|^2 over the sample, about an origin."""
        return inducing.square(self._blocks(origin))

    def tally(self, centres: Float[Tensor, "k d"], origin: Float[Tensor, " d"]) -> Tally:
        """What Lloyd's step needs of the sample."""
        found = inducing.tally_all(self._blocks(origin), centres.to(self.device))
        return Tally(*(x.cpu() for x in found))

    def _blocks(self, origin: Float[Tensor, " d"]) -> list[inducing.Block]:
        return inducing.in_blocks(self._sampled, origin.to(self.device))

    @property
    def _sampled(self) -> Tensor:
        assert self._sample is not None
        return self._sample

    # --- Inference ----------------------------------------------------------------------------

    def gather(self, plan: Plan) -> Gathered:
        """The first pass: H of the bags, which stays here, and its sums."""
        assert self.positive is not None
        self._sample, self._plan, self._gp = None, plan, plan.gp(self.device)
        self._map = plan.feature_map.on(self.device)
        self.pieces, self._problem = (), None  # an earlier H goes before the next one comes
        self._grades, self._watched = None, None
        if self._watching is not None:
            rows, n = self._evenly(*self._watching)[0], self.bags.n_instances
            self._watched = Watched.of(self._gp, rows, n)
        source = Source(
            self._gp, self._inputs, self.bags.adjacency, self.bags.offsets, self.positive,
            plan.strength, plan.dtype, plan.likelihood, self._known(), plan.residual,
            self._watched,
        )  # fmt: skip
        found = self._gathered(source, plan.store)
        # the pieces as `summed` takes them: the rest of a problem is the coordinator's
        n = self.bags.n_instances
        self._problem = Problem(self.pieces, found.gram, found.gram, 0.0, n, 0.0)
        return Gathered(found.gram.cpu(), found.trace)

    def take_grades(self, codes: Int[np.ndarray, " b"], cuts: Float[np.ndarray, " k"]) -> None:
        """All that the grade of every bag says, in place of whether it is above the lowest."""
        assert self._problem is not None
        self._grades = Grades(codes, self.bags.offsets, cuts)
        self._problem = self._grades.problem(self._problem)
        self.pieces = self._problem.chunks

    def _gathered(self, source: Source, store: str) -> Gathered:
        """The pieces, and the sums of the first pass: from what is kept, where something is."""
        kept = None if self.kept is None else self.kept.at(source)
        if kept is not None:
            self.kept, self.pieces, self._watched = kept, kept.pieces(source), None
            return kept.gathered
        self.pieces, found = gather(source, store)
        self.kept = Kept.of(source, self.pieces, found) if self.keeps else None
        return found

    def _known(self) -> Int[np.ndarray, " n"] | None:
        """Labels of instances, where they count."""
        assert self._plan is not None
        return self.bags.instance_labels if self._plan.taught else None

    def _inputs(self, rows: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        return self._map(features.take(self.rows, rows))

    def sums(self, *call: Any) -> tuple:
        """What a method of `Piece` gives, summed here: its arguments, and last its name."""
        *given, term = call
        args = [x.to(self.device) if isinstance(x, Tensor) else x for x in given]
        return self._summed(lambda piece: getattr(piece, term)(*args))

    def _summed(self, terms: Callable[[Piece], tuple]) -> tuple:
        assert self._problem is not None
        return to_cpu(summed(self._problem, terms))

    def gamma(self, w: Float[Tensor, " M"], c: float) -> Float[Tensor, " n"]:
        """d log Z_b / d mu of every instance."""
        return torch.cat([piece.gamma(w.to(self.device), c) for piece in self.pieces]).cpu()

    def turn(self, state: State, at: Process | None, c: float) -> tuple:
        """A turn of VGPMIL: its sums, and what the state of the instances here has become."""
        state = state.to(self.device, copy=True)
        at = None if at is None else at.to(self.device)
        return *self._summed(lambda piece: piece.turn(state, at, c)), state.cpu()

    def traits(self) -> tuple[bool, bool, float]:
        """Of the likelihood here: `moments_are_gradient`, `leaves_out` and `roughness`."""
        known = [piece.likelihood for piece in self.pieces]
        rough = sum(k.roughness for k in known)
        return any(k.moments_are_gradient for k in known), all(k.leaves_out for k in known), rough

    def unsettled(self) -> int:
        """Bags whose expectation propagation has not converged."""
        return sum(piece.likelihood.unsettled for piece in self.pieces)

    def leave_out(
        self, at: Optimum, mean: Mean, score: Score = leave_out.scores
    ) -> Float[Tensor, " b"]:
        """log p(y_b) of every bag under the fit without it; `at` is the fit to all partitions."""
        R_inverse, J_inverse = at.R_inverse.to(self.device), at.J_inverse.to(self.device)
        at = Optimum(at.w.to(self.device), at.c, R_inverse, J_inverse)
        found = torch.empty(len(self.bags), dtype=torch.float64)
        for numbers, bag in self.padded():
            if self._grades is not None:
                found[numbers] = self._grades.left_out(numbers, bag, at).cpu()
            else:
                found[numbers] = leave_out.scores_without(bag, at, mean, score).cpu()
        return found

    def suspects(self, w: Float[Tensor, " M"], R: Float[Tensor, "M M"], c: float) -> Suspects:
        """Patches of positive bags under the fit to all partitions: where points may be wanted."""
        assert self._plan is not None and self.positive is not None
        q = Posterior.build(w.to(self.device), R.to(self.device))
        predictor = Predictor.build(self._gp, q, c)
        rows = np.flatnonzero(self.positive[self.bags.bag_index])
        offsets = np.concatenate([[0], np.cumsum(self.bags.sizes[self.positive])])
        adjacency = self.bags.adjacency[rows][:, rows]
        none = self._gp.inducing[:0]
        found = Suspects(none, none.new_zeros(0), none.new_zeros(0))
        for part in parts(adjacency, offsets, self._plan.strength, self.device):
            x = self._inputs(torch.from_numpy(rows).to(self.device)[part.rows])
            sizes = torch.from_numpy(np.diff(offsets)[part.bags]).to(self.device)
            mean, variance = marginal(predictor, part, x, sizes)
            p = torch.special.ndtr(mean / variance.sqrt())
            found = lesion_points.foremost([found, lesion_points.suspects(self._gp, x, p)])
        return Suspects(*(a.cpu() for a in found))

    def padded(
        self, chosen: Int[np.ndarray, " k"] | None = None
    ) -> Iterator[tuple[Int[np.ndarray, " b"], Bag]]:
        """All or some bags as `leave_out` takes them, in batches, with their numbers."""
        assert self._plan is not None and self.positive is not None
        positive = torch.from_numpy(self.positive).to(self.device)
        labels = self._known()
        known = None if labels is None else torch.tensor(labels, device=self.device)
        chosen = np.arange(len(self.bags)) if chosen is None else chosen
        adjacency, offsets = self.bags.adjacency, self.bags.offsets
        for part in dense_parts(adjacency, offsets, chosen, self._plan.strength, self.device):
            x = self._inputs(part.rows)
            bag = leave_out.padded_bag(self._gp, part, x, positive[part.bags])
            yield part.bags, bag if known is None else bag.with_known(known[part.rows])


def to_cpu(values: tuple) -> tuple:
    """The same, off the GPU."""
    return tuple(x.cpu() if isinstance(x, Tensor) else x for x in values)


# --- Predictions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """What a model says of bags and instances, in order, without the bags themselves.

    Arrays of instances are None where the model has no such thing.
    """

    names: np.ndarray  # (B,)
    sizes: Int[np.ndarray, " B"]
    log_proba_negative: Float[np.ndarray, " B"]
    error: Float[np.ndarray, " B"]
    proba: Float[np.ndarray, "B 2"]
    probability: Float[np.ndarray, " N"] | None  # of the instances, as are those below
    mean: Float[np.ndarray, " N"] | None
    std: Float[np.ndarray, " N"] | None
    p_value: Float[np.ndarray, " N"] | None
    flagged: np.ndarray | None
    class_proba: Float[np.ndarray, "B K"] | None = None  # of grades or types, as is the one below
    class_probability: Float[np.ndarray, "N K"] | None = None

    @classmethod
    def of(cls, model: Any, bags: Bags) -> "Predicted":
        """The predictions of some bags."""
        found = model.predict_all(bags)
        slides = ("log_proba_negative", "error", "proba", "class_proba")
        own = {k: getattr(found, k) for k in slides}
        each = ("probability", "mean", "std", "p_value", "flagged", "class_probability")
        own |= {k: getattr(found.instances, k, None) for k in each}
        return cls(names=bags.names, sizes=bags.sizes, **own)

    @classmethod
    def join(cls, parts: Sequence["Predicted"]) -> "Predicted":
        """One after the other."""
        columns: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            values = [getattr(part, name) for part in parts]
            columns[name] = None if values[0] is None else np.concatenate(values)
        return cls(**columns)
