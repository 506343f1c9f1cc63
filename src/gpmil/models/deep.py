"""The estimator of every neural model of bags: settings, fit, prediction, saving."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.data.bags import Bags
from gpmil.models import saved_checks
from gpmil.models.base import resolve_device
from gpmil.models.batches import Batch, BatchSource, Inputs
from gpmil.models.checks import count, flag, generator, number, one_of, require_numbers
from gpmil.models.networks import Network
from gpmil.models.saved import Arrays, Card, SavedModel
from gpmil.models.training import Training, hold_out

logger = logging.getLogger("gpmil")

Model = TypeVar("Model", bound="DeepMIL")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
ROOM = 2 * 2**30  # bytes of network inputs kept in memory while training on a CPU
WEIGHTS = "weights."


@dataclass(kw_only=True, eq=False, repr=False)
class NetworkSettings:
    """The settings of every network; `MeanPoolMIL` says what they mean.

    A dataclass writes the constructor, in which scikit-learn looks for the names of settings.
    """

    hidden_dim: Any = 128
    dropout: Any = 0.0
    learning_rate: Any = 1e-4
    weight_decay: Any = 1e-2
    max_epochs: Any = 50
    batch_size: Any = 4
    validation: Any = None
    patience: Any = 10
    class_weight: Any = "balanced"
    standardize: Any = True
    n_components: Any = None
    random_state: Any = None
    device: Any = None
    dtype: Any = "float32"
    verbose: Any = False


class DeepMIL(NetworkSettings, SavedModel):
    """A neural model of bags; a subclass names its network."""

    network_class: type[Network]
    training_class: type[Training] = Training
    architecture_: dict[str, Any]  # arguments of the network
    weights_: dict[str, np.ndarray]
    history_: list[dict[str, Any]]
    n_epochs_: int
    best_epoch_: int
    converged_: bool | None

    # --- What a subclass says ------------------------------------------------------------------

    def _architecture(self, bags: Bags) -> dict[str, Any]:
        """Arguments of the network, for the bags to be fitted."""
        return {"hidden_dim": int(self.hidden_dim), "dropout": float(self.dropout)}

    def _targets(self, labels: np.ndarray) -> np.ndarray:
        """What a bag is to be trained to: its label, 0 or 1."""
        return labels

    def _graphs(self, bags: Bags, device: torch.device, training: bool) -> Any:
        """Neighbour graphs for the batches; None for a network that uses none."""
        return None

    # --- Fit ----------------------------------------------------------------------------------

    def fit(self: Model, bags, y=None) -> Model:
        """Train on labelled bags; y (0/1, one per bag) wins over `bags.labels`."""
        with torch.enable_grad():
            return super().fit(bags, y)

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        labels = self._remember_cohort(bags, y)
        device, dtype = resolve_device(self.device), DTYPES[self.dtype]
        random = generator(self.random_state)
        seeds = random.integers(2**31, size=3)
        self._fit_feature_map(bags.features)
        self.architecture_ = {"n_inputs": self._n_inputs(), **self._architecture(bags)}
        held_out = np.zeros(0, dtype=np.int64)
        if self.validation is not None:
            held_out = hold_out(labels, bags.groups, float(self.validation), int(seeds[0]))
        training = np.setdiff1d(np.arange(len(bags)), held_out)

        network = self._network(int(seeds[1])).to(device, dtype)
        network.random = torch.Generator(device).manual_seed(int(seeds[2]))
        run = self.training_class(
            self._source(bags, dtype, device, training=True),
            torch.from_numpy(self._targets(labels)).to(device, dtype),
            self._bag_weights(self._targets(labels), training).to(device, dtype),
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
        counts = np.bincount(labels[training], minlength=2)
        weights = len(training) / (len(counts) * np.maximum(counts, 1))
        return torch.from_numpy(weights[labels])

    def _source(
        self, bags: Bags, dtype: torch.dtype, device: torch.device, training: bool
    ) -> BatchSource:
        """The bags in batches; their inputs are kept while training, which takes them again."""
        room = _room(device) if training else 0
        inputs = Inputs(bags.features, self._feature_map(), dtype, device, room)
        return BatchSource(inputs, bags.offsets, self._graphs(bags, device, training))

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
        source = self._source(bags, dtype, device, training=False)
        with torch.no_grad():
            for batch in source.runs(np.arange(len(bags))):
                yield network, batch

    def _per_instance(
        self, bags: Bags, of: Callable[[Any, Batch], Float[Tensor, " n"]]
    ) -> Float[np.ndarray, " N"]:
        """One number per instance, which `of` takes from the network and a batch."""
        found = np.empty(bags.n_instances)
        for network, batch in self._batches(bags):
            rows = slice(bags.offsets[batch.bags[0]], bags.offsets[batch.bags[-1] + 1])
            found[rows] = of(network, batch).cpu().numpy()
        require_numbers(found)
        return found

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
            flag(name, getattr(self, name))
        if self.n_components is not None:
            count("n_components", self.n_components, least=1)

    # --- Save ---------------------------------------------------------------------------------

    NUMBERS = SavedModel.NUMBERS | {
        "architecture_": saved_checks.part,
        "n_epochs_": saved_checks.from_one,
        "best_epoch_": saved_checks.from_zero,
        "converged_": saved_checks.or_none(flag),
        "history_": saved_checks.parts,
    }
    WEIGHT_SHAPES: ClassVar[dict[str, saved_checks.Shape]] = {
        "embed.weight": ("hidden_dim", "d"),
        "embed.bias": ("hidden_dim",),
        "classify.weight": (1, "hidden_dim"),
        "classify.bias": (1,),
    }

    def _saved_besides(self) -> tuple[Arrays, Card]:
        return {WEIGHTS + k: v for k, v in self.weights_.items()}, {}

    def _restore(self, arrays: Arrays, card: Card, sizes: saved_checks.Symbols) -> None:
        self.weights_ = {
            k.removeprefix(WEIGHTS): v for k, v in arrays.items() if k.startswith(WEIGHTS)
        }
        self._check_network(sizes)

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
        return self.WEIGHT_SHAPES


def _room(device: torch.device) -> float:
    """Bytes that the inputs of the network may take."""
    if device.type == "cpu":
        return ROOM
    return 0.5 * torch.cuda.mem_get_info(device)[0]
