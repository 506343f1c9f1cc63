"""What the neural models share: batches of whole bags, training, prediction, saving.

A network maps a `Batch` to one logit a bag, log P(y = 1) - log P(y = 0). The bags of a batch lie
one after the other, and sums over a bag are segment sums: nothing is padded.
"""

import copy
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Num, Shaped
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from gpmil.coupling.operator import instance_rows
from gpmil.data.bags import Bags
from gpmil.data.folds import folds
from gpmil.files import persistence
from gpmil.models import saved_checks
from gpmil.models.base import (
    BagClassifier,
    InstancePredictions,
    cohort_card,
    package_versions,
    resolve_device,
    training_labels,
)
from gpmil.models.checks import count, generator, number, one_of, plain, require_numbers
from gpmil.process import features
from gpmil.process.features import FeatureMap

logger = logging.getLogger("gpmil")

Model = TypeVar("Model", bound="DeepMIL")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
ROWS = 2**15  # instances predicted at a time, unless one bag has more
MOVED = 2**20  # instances whose numbers go to the device at a time
ROOM = 2 * 2**30  # bytes of network inputs kept in memory while training on a CPU
FEWEST = 5  # bags (patients) of each class below which none are held out to stop early
ARRAYS = ("classes_", "feature_mean_", "feature_scale_", "feature_components_")
NUMBERS = (
    "n_features_in_",
    "cohort_",
    "architecture_",
    "n_epochs_",
    "best_epoch_",
    "converged_",
    "history_",
)
WEIGHTS = "weights."

# ------------------------------------------------------------------ batches


@dataclass(frozen=True)
class Batch:
    """Some bags, one after the other."""

    x: Float[Tensor, "n d"]
    segment: Int[Tensor, " n"]  # the place in the batch of each instance's bag
    bags: Int[np.ndarray, " b"]  # their numbers in the cohort
    chosen: Int[Tensor, " b"]  # the same, where x is
    smooth: Callable[[Tensor, Tensor], Tensor] | None = None  # scores over neighbours, where asked

    def __len__(self) -> int:
        return len(self.bags)


def segment_sum(x: Float[Tensor, "n *d"], segment: Int[Tensor, " n"], b: int) -> Tensor:  # noqa: F821
    """The sum over each bag, (b, ...)."""
    return x.new_zeros(b, *x.shape[1:]).index_add_(0, segment, x)


def segment_mean(x: Float[Tensor, "n d"], segment: Int[Tensor, " n"], b: int) -> Tensor:
    """The mean over each bag, (b, d)."""
    # not by bincount, which makes the CPU wait for a GPU
    sizes = segment_sum(torch.ones_like(x[:, 0]), segment, b)
    return segment_sum(x, segment, b) / sizes[:, None]


def segment_max(x: Float[Tensor, " n"], segment: Int[Tensor, " n"], b: int) -> Float[Tensor, " b"]:
    """The maximum over each bag."""
    return x.new_full((b,), -torch.inf).scatter_reduce_(0, segment, x, "amax")


def segment_softmax(
    x: Float[Tensor, " n"], segment: Int[Tensor, " n"], b: int
) -> Float[Tensor, " n"]:
    """exp(x_i) / sum_j exp(x_j) over each bag; the largest is taken off, so none overflows."""
    # index_select, not [segment]: its gradient adds up where the other first sorts
    e = (x - segment_max(x.detach(), segment, b).index_select(0, segment)).exp()
    return e / segment_sum(e, segment, b).index_select(0, segment)


class Inputs:
    """Rows of features as the network sees them.

    Mapped once and kept where they fit, else row by row when asked for (a memory-mapped file).
    """

    def __init__(
        self,
        raw: Num[np.ndarray, "N D"],
        feature_map: FeatureMap,
        dtype: torch.dtype,
        device: torch.device,
        room: float = 0,
    ):
        self.raw, self.feature_map, self.dtype, self.device = raw, feature_map, dtype, device
        self.kept: Tensor | None = None
        width = raw.shape[1] if feature_map.components is None else len(feature_map.components)
        if len(raw) * width * dtype.itemsize <= room:
            self.kept = torch.empty(len(raw), width, dtype=dtype, device=device)
            for start in range(0, len(raw), features.ROWS):
                rows = slice(start, start + features.ROWS)
                self.kept[rows] = feature_map(raw[rows], device).to(dtype)

    def index(self, rows: Int[np.ndarray, " n"]) -> Int[Tensor, " n"]:
        """Numbers of instances, where they are looked up."""
        return torch.from_numpy(rows).to("cpu" if self.kept is None else self.device)

    def take(self, rows: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        """The inputs of some instances, by their `index`."""
        if self.kept is not None:
            return self.kept.index_select(0, rows)
        return self.feature_map(self.raw[rows.numpy()], self.device).to(self.dtype)

    def __call__(self, rows: Int[np.ndarray, " n"]) -> Float[Tensor, "n d"]:
        """The inputs of some instances."""
        return self.take(self.index(rows))


@dataclass(frozen=True)
class Cohort:
    """The bags of a cohort, to be taken in batches."""

    inputs: Inputs
    offsets: Int[np.ndarray, " edges"]
    graphs: Any = None  # of neighbours, for a network that uses them

    def batches(self, parts: Sequence[np.ndarray]) -> Iterator[Batch]:
        """A batch of each part, its bags in the order given.

        What batches are made of goes to the device for many of them at a time: a copy a batch
        would take longer than a step of a small network.
        """
        rows = np.array([self._sizes(part).sum() for part in parts], dtype=np.int64)
        for few in _cut(rows, MOVED):
            yield from self._moved([parts[k] for k in few])

    def runs(self, bags: Int[np.ndarray, " b"], rows: int = ROWS) -> Iterator[Batch]:
        """Those bags in batches of about `rows` instances."""
        return self.batches([bags[few] for few in _cut(self._sizes(bags), rows)])

    def _sizes(self, bags: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
        return self.offsets[bags + 1] - self.offsets[bags]

    def _moved(self, parts: Sequence[np.ndarray]) -> Iterator[Batch]:
        bags, counts = np.concatenate(parts), [len(part) for part in parts]
        sizes = self._sizes(bags)
        place = np.concatenate([np.arange(n) for n in counts])
        rows = [int(self._sizes(part).sum()) for part in parts]
        device = self.inputs.device
        pieces = zip(
            parts,
            torch.from_numpy(bags).to(device).split(counts),
            torch.from_numpy(np.repeat(place, sizes)).to(device).split(rows),
            self.inputs.index(instance_rows(self.offsets, bags)).split(rows),
            repeat(None, len(parts)) if self.graphs is None else self.graphs.batches(parts),
            strict=True,
        )
        for part, chosen, segment, index, smooth in pieces:
            yield Batch(self.inputs.take(index), segment, part, chosen, smooth)


def _cut(sizes: Int[np.ndarray, " k"], rows: int) -> list[np.ndarray]:
    """0, 1, ..., k - 1 in runs of about `rows` together; none where there is nothing."""
    if not len(sizes):
        return []
    ends = np.flatnonzero(np.diff((np.cumsum(sizes) - 1) // rows)) + 1
    return np.split(np.arange(len(sizes)), ends)


# ------------------------------------------------------------------ networks


def linear(n_in: int, n_out: int, random: torch.Generator, bias: bool = True) -> nn.Linear:
    """A linear layer, uniform in +-1/sqrt(n_in), by a generator of its own."""
    layer = nn.utils.skip_init(nn.Linear, n_in, n_out, bias=bias, dtype=torch.float64)
    bound = n_in**-0.5
    for weight in layer.parameters():
        nn.init.uniform_(weight, -bound, bound, generator=random)
    return layer


class Network(nn.Module):
    """h_i = ReLU(W x_i + b) for every instance; subclasses make one logit a bag of them."""

    def __init__(self, n_inputs: int, hidden_dim: int, dropout: float, random: torch.Generator):
        super().__init__()
        self.embed = linear(n_inputs, hidden_dim, random)
        self.dropout = dropout
        self.random: torch.Generator | None = None  # of dropout, while training

    def embedding(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n h"]:
        """h, some of it dropped while training."""
        h = self.embed(x).relu()
        if not self.training or not self.dropout:
            return h
        kept = torch.empty_like(h).bernoulli_(1 - self.dropout, generator=self.random)
        return h * kept / (1 - self.dropout)

    def forward(self, batch: Batch) -> Float[Tensor, " b"]:
        """One logit a bag."""
        raise NotImplementedError

    def groups(self, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """The parameters as the optimiser wants them."""
        decay = {"lr": learning_rate, "weight_decay": weight_decay}
        return [{"params": list(self.parameters()), **decay}]


# ------------------------------------------------------------------ training


@dataclass
class Training:
    """How a network is trained, and what became of it."""

    cohort: Cohort
    labels: Float[Tensor, " B"]
    weights: Float[Tensor, " B"]  # of the bags, in the loss
    learning_rate: float
    weight_decay: float
    max_epochs: int
    batch_size: int
    patience: int
    random: np.random.Generator  # of the order of the bags
    history: list[dict[str, Any]] = field(default_factory=list)
    best_epoch: int = 0
    converged: bool | None = None  # stopped early; None where no bags were held out

    def __post_init__(self) -> None:
        self.signs = 1 - 2 * self.labels

    def run(
        self,
        network: Network,
        training: Int[np.ndarray, " t"],
        held_out: Int[np.ndarray, " v"],
    ) -> None:
        """Train; where bags are held out, until their loss has not fallen for `patience` epochs.

        The weights of the epoch with the lowest held-out loss are put back.
        """
        groups = network.groups(self.learning_rate, self.weight_decay)
        # one kernel for all weights on a GPU
        optimiser = torch.optim.AdamW(groups, fused=self.labels.is_cuda or None)
        best, kept = np.inf, None
        for epoch in range(1, self.max_epochs + 1):
            entry: dict[str, Any] = {"epoch": epoch}
            entry["train_loss"] = self._epoch(network, optimiser, training)
            entry["validation_loss"] = self.loss(network, held_out) if len(held_out) else None
            self._note(entry)
            if not len(held_out):
                self.best_epoch = epoch
            elif entry["validation_loss"] < best:
                best, self.best_epoch = entry["validation_loss"], epoch
                kept = copy.deepcopy(network.state_dict())
            elif epoch - self.best_epoch >= self.patience:
                break
        if kept is not None:
            network.load_state_dict(kept)
            self.converged = len(self.history) - self.best_epoch >= self.patience
        network.eval()

    def _epoch(
        self, network: Network, optimiser: torch.optim.Optimizer, bags: Int[np.ndarray, " t"]
    ) -> float:
        """One pass over the bags in a new order; the mean loss on the way."""
        network.train()
        order = self.random.permutation(bags)
        parts = [order[k : k + self.batch_size] for k in range(0, len(order), self.batch_size)]
        losses = []
        # gradients in this thread: a step is so small that handing it to another would take longer
        with torch.autograd.set_multithreading_enabled(False):
            for batch in self.cohort.batches(parts):
                loss = self._losses(network, batch).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.detach())
        # read once: reading every loss would make the CPU wait for the device at every step
        found = torch.stack(losses).double().cpu().numpy()
        return float(found @ [len(part) for part in parts]) / len(bags)

    @torch.no_grad()
    def loss(self, network: Network, bags: Int[np.ndarray, " v"]) -> float:
        """The mean loss of some bags, nothing dropped."""
        network.eval()
        found = [self._losses(network, batch) for batch in self.cohort.runs(bags)]
        return float(torch.cat(found).mean())

    def _losses(self, network: Network, batch: Batch) -> Float[Tensor, " b"]:
        sign, weights = (a.index_select(0, batch.chosen) for a in (self.signs, self.weights))
        # -log P(y) = log(1 + exp(-t)) of a positive bag with logit t, log(1 + exp(t)) of another
        return weights * nn.functional.softplus(sign * network(batch))

    def _note(self, entry: dict[str, Any]) -> None:
        found = [v for v in (entry["train_loss"], entry["validation_loss"]) if v is not None]
        if not np.isfinite(found).all():
            raise ValueError(
                f"training diverged in epoch {entry['epoch']}: the loss is {found[0]}. Lower "
                f"learning_rate (it is {self.learning_rate:g}), or standardise the features."
            )
        self.history.append(entry)
        if entry["epoch"] % max(1, self.max_epochs // 10) == 0:
            losses = ", ".join(f"{v:.4f}" for v in found)
            logger.info("epoch %d of %d: loss %s", entry["epoch"], self.max_epochs, losses)


def hold_out(
    labels: Int[np.ndarray, " B"],
    groups: Shaped[np.ndarray, " B"] | None,
    share: float,
    seed: int,
) -> Int[np.ndarray, " v"]:
    """About a `share` of the bags, both classes among them, patients kept together.

    None where a class has too few bags (patients) to spare any; it is said.
    """
    units = np.arange(len(labels)) if groups is None else groups
    fewest = min(len(np.unique(units[labels == y])) for y in (0, 1))
    n_folds = round(1 / share)
    fold = np.zeros(0, dtype=np.int64)
    if fewest >= max(FEWEST, n_folds):
        fold = folds(labels, groups, n_folds, seed)
    parts = [np.flatnonzero(fold == k) for k in range(fold.max(initial=-1) + 1)]
    parts = [part for part in parts if len(set(labels[part])) == 2]
    if parts:
        return min(parts, key=lambda part: abs(len(part) - share * len(labels)))
    logger.warning(
        "no bags are held out to stop training early: %d %s of the rarer class are too few for "
        "that. All of max_epochs is trained; validation=None says the same.",
        fewest,
        "bags" if groups is None else "patients",
    )
    return np.zeros(0, dtype=np.int64)


# ------------------------------------------------------------------ the estimators


class DeepMIL(BagClassifier):
    """A neural model of bags: settings, fit, prediction and saving; subclasses name a network."""

    network_class: type[Network]
    architecture_: dict[str, Any]  # arguments of the network
    weights_: dict[str, np.ndarray]
    feature_mean_: np.ndarray
    feature_scale_: np.ndarray
    feature_components_: np.ndarray | None
    cohort_: dict[str, Any]
    history_: list[dict[str, Any]]
    n_epochs_: int
    best_epoch_: int
    converged_: bool | None

    def __init__(
        self,
        *,
        hidden_dim=128,
        dropout=0.0,
        learning_rate=1e-4,
        weight_decay=1e-2,
        max_epochs=50,
        batch_size=4,
        validation=None,
        patience=10,
        class_weight="balanced",
        standardize=True,
        n_components=None,
        random_state=None,
        device=None,
        dtype="float32",
        verbose=False,
    ):
        self.hidden_dim = hidden_dim
        self.dropout = dropout
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.validation = validation
        self.patience = patience
        self.class_weight = class_weight
        self.standardize = standardize
        self.n_components = n_components
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    # --- What a subclass says ------------------------------------------------------------------

    def _architecture(self, bags: Bags) -> dict[str, Any]:
        """Arguments of the network, for the bags to be fitted."""
        return {"hidden_dim": int(self.hidden_dim), "dropout": float(self.dropout)}

    def _graphs(self, bags: Bags, device: torch.device, training: bool) -> Any:
        """Neighbour graphs for the batches; None for a network that uses none."""
        return None

    # --- Fit ----------------------------------------------------------------------------------

    def fit(self: Model, bags, y=None) -> Model:
        """Train on labelled bags; y (0/1, one a bag) wins over `bags.labels`."""
        with torch.enable_grad():
            return super().fit(bags, y)

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        labels, self.classes_ = training_labels(bags, y)
        device, dtype = resolve_device(self.device), DTYPES[self.dtype]
        random = generator(self.random_state)
        seeds = random.integers(2**31, size=3)
        self.n_features_in_ = bags.n_features
        self.cohort_ = cohort_card(bags, labels)
        self._fit_feature_map(bags.features)
        self.architecture_ = {"n_inputs": self._n_inputs(), **self._architecture(bags)}
        held_out = np.zeros(0, dtype=np.int64)
        if self.validation is not None:
            held_out = hold_out(labels, bags.groups, float(self.validation), int(seeds[0]))
        training = np.setdiff1d(np.arange(len(bags)), held_out)

        network = self._network(int(seeds[1])).to(device, dtype)
        network.random = torch.Generator(device).manual_seed(int(seeds[2]))
        inputs = Inputs(bags.features, self._feature_map(), dtype, device, _room(device))
        cohort = Cohort(inputs, bags.offsets, self._graphs(bags, device, training=True))
        run = Training(
            cohort,
            torch.from_numpy(labels).to(device, dtype),
            self._bag_weights(labels, training).to(device, dtype),
            float(self.learning_rate),
            float(self.weight_decay),
            int(self.max_epochs),
            int(self.batch_size),
            int(self.patience),
            random,
        )
        counts = len(training), len(held_out), bags.n_instances
        logger.info("fit: %d bags, %d held out, %d instances", *counts)
        run.run(network, training, held_out)
        self.history_, self.n_epochs_ = run.history, len(run.history)
        self.best_epoch_, self.converged_ = run.best_epoch, run.converged
        self._keep(network)

    def _network(self, seed: int = 0) -> Network:
        random = torch.Generator().manual_seed(seed)
        return type(self).network_class(**self.architecture_, random=random)

    def _keep(self, network: Network) -> None:
        """The trained weights, on the CPU."""
        self.weights_ = {k: v.detach().cpu().numpy() for k, v in network.state_dict().items()}

    def _bag_weights(self, labels: np.ndarray, training: np.ndarray) -> Float[Tensor, " B"]:
        if self.class_weight is None:
            return torch.ones(len(labels), dtype=torch.float64)
        # n / (2 n_y): both classes weigh the same, a bag weighs one on average
        weights = len(training) / (2 * np.bincount(labels[training], minlength=2))
        return torch.from_numpy(weights[labels])

    def _n_inputs(self) -> int:
        components = self.feature_components_
        return len(self.feature_scale_) if components is None else len(components)

    # --- Predict ------------------------------------------------------------------------------

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(y_b = 0) of each bag, and zeros: a network computes it without an error."""
        bags = self._check_predictable(bags)
        logit = np.empty(len(bags))
        for network, batch in self._batches(bags):
            logit[batch.bags] = network(batch).cpu().numpy()
        require_numbers(logit)
        # log P(y = 0) = -log(1 + exp(logit))
        return -np.logaddexp(0, logit), np.zeros(len(bags))

    def _batches(self, bags: Bags) -> Iterator[tuple[Any, Batch]]:
        """The fitted network, with the bags batch by batch."""
        device = resolve_device(self.device)
        weights = {k: torch.from_numpy(v) for k, v in self.weights_.items()}
        dtype = weights["embed.weight"].dtype
        network = self._network()
        network.load_state_dict(weights)
        network = network.to(device, dtype).eval()
        inputs = Inputs(bags.features, self._feature_map(), dtype, device)
        cohort = Cohort(inputs, bags.offsets, self._graphs(bags, device, training=False))
        with torch.no_grad():
            for batch in cohort.runs(np.arange(len(bags))):
                yield network, batch

    def predict_instances(self, bags) -> InstancePredictions:
        """Refused, with the reason, by a model that has no probability for an instance."""
        raise ValueError(
            f"{type(self).__name__} is trained on whole bags and has no probability for an "
            "instance. Use gpmil.VGPMILPRI for probabilities and marks of instances."
        )

    # --- Check --------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        generator(self.random_state)
        one_of("dtype", self.dtype, tuple(DTYPES))
        number("learning_rate", self.learning_rate, above=0)
        number("weight_decay", self.weight_decay, least=0)
        for name in ("hidden_dim", "max_epochs", "batch_size", "patience"):
            count(name, getattr(self, name), least=1)
        number("dropout", self.dropout, least=0)
        if self.dropout >= 1:
            raise ValueError(f"dropout must be below 1 (a quarter is 0.25), got {self.dropout!r}.")
        if self.class_weight is not None:
            one_of("class_weight", self.class_weight, ("balanced",))
        if self.validation is not None:
            number("validation", self.validation, above=0)
            if self.validation > 0.5:
                raise ValueError(
                    "validation must be None or a share of the bags up to 0.5 (a fifth is 0.2), "
                    f"got {self.validation!r}."
                )
        for name in ("standardize", "verbose"):
            check_flag(name, getattr(self, name))
        if self.n_components is not None:
            count("n_components", self.n_components, least=1)

    # --- Save ---------------------------------------------------------------------------------

    _own_numbers: tuple[str, ...] = ()
    CHECKS: dict[str, saved_checks.Check] = saved_checks.NETWORK_NUMBERS

    def save(self, path: str | os.PathLike) -> None:
        """Write the model to a folder (safetensors and JSON); `gpmil.load` reads it."""
        check_is_fitted(self)
        arrays = {k: getattr(self, k) for k in ARRAYS if getattr(self, k) is not None}
        settings = self.get_params(deep=False)
        del settings["device"]  # chosen anew where it is loaded
        card = {
            "class": type(self).__name__,
            "settings": {k: plain(v) for k, v in settings.items()},
            "fitted": {k: getattr(self, k) for k in (*NUMBERS, *self._own_numbers)},
            "versions": package_versions(),
        }
        weights = {WEIGHTS + k: v for k, v in self.weights_.items()}
        persistence.write(path, arrays | weights, card)

    @classmethod
    def _from_saved(cls, arrays: dict[str, np.ndarray], card: dict[str, Any], kernel=None):
        if kernel is not None:
            raise ValueError(f"a {cls.__name__} has no kernel: load it without kernel=.")
        settings = saved_checks.mapping(card, "settings")
        known = cls().get_params(deep=False)
        del known["device"]
        saved_checks.check_known("settings", settings, known, cls.__name__)
        model = cls(**settings)
        saved_checks.as_damage("settings", model._check_settings)
        fitted = saved_checks.mapping(card, "fitted")
        saved_checks.check_numbers(fitted, cls.CHECKS)
        sizes = saved_checks.check_features(arrays, fitted, model.n_components)
        for name in ARRAYS:
            setattr(model, name, arrays.get(name))
        for name in (*NUMBERS, *cls._own_numbers):
            setattr(model, name, fitted[name])
        model.weights_ = {
            k.removeprefix(WEIGHTS): v for k, v in arrays.items() if k.startswith(WEIGHTS)
        }
        model._check_network(sizes)
        return model

    def _check_network(self, sizes: saved_checks.Symbols) -> None:
        """Refuse weights that are not of the network that the settings ask for."""
        expected = self._saved_architecture(sizes["d"])
        saved_checks.check_same("architecture_", self.architecture_, expected)
        self.architecture_ = expected  # a whole number may have come as 4.0
        sizes |= {k: v for k, v in expected.items() if k.endswith("_dim")}
        kind = "finite" if self.dtype == "float64" else "float32"
        saved_checks.check_weights(self.weights_, self._weight_shapes(), kind, sizes)

    def _saved_architecture(self, n_inputs: int) -> dict[str, Any]:
        """The arguments of the network that the settings ask for."""
        own = {"hidden_dim": int(self.hidden_dim), "dropout": float(self.dropout)}
        return {"n_inputs": n_inputs, **own}

    def _weight_shapes(self) -> dict[str, saved_checks.Shape]:
        return saved_checks.NETWORK


def check_flag(name: str, value: Any) -> None:
    """Insist on a truth value."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def _room(device: torch.device) -> float:
    """Bytes that the inputs of the network may take."""
    if device.type == "cpu":
        return ROOM
    return 0.5 * torch.cuda.mem_get_info(device)[0]
