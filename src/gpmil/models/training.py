"""Training of a network on whole bags, and the bags held out to stop it early."""

import copy
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from gpmil.data.folds import folds
from gpmil.models.batches import Batch, BatchSource
from gpmil.models.networks import Network

logger = logging.getLogger("gpmil")

FEWEST = 5  # bags (patients) of each class below which none are held out to stop early


@dataclass
class Training:
    """How a network is trained, and what became of it."""

    source: BatchSource
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
            for batch in self.source.batches(parts):
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
        found = [self._losses(network, batch) for batch in self.source.runs(bags)]
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
