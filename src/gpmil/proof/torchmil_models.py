"""Networks of torchmil (github.com/Franblueee/torchmil), where it is installed, as models of bags.

They are trained as ours are: standardised features, Adam at 1e-4, weight decay 1e-2, 50 epochs,
four bags at a time.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from gpmil.data.bags import Bags
from gpmil.models.base import BagClassifier

RATE, DECAY = 1e-4, 1e-2
HIDDEN = 128  # of the embedding of instances, as ours
NETWORKS = ("ABMIL", "DSMIL")  # TransformerABMIL takes some twenty times as long


def installed() -> bool:
    """Whether torchmil's models can be imported."""
    return importlib.util.find_spec("torchmil") is not None and (
        importlib.util.find_spec("torchmil.models") is not None
    )


@dataclass(kw_only=True, eq=False, repr=False)
class TorchmilModel(BagClassifier):
    """A network of torchmil, by the name of its class."""

    network: str = "ABMIL"
    max_epochs: int = 50
    batch_size: int = 4
    standardize: bool = True
    n_components: int | None = None
    random_state: int = 0
    verbose: bool = False

    def _fit(self, bags: Bags, y) -> None:
        labels = self._remember_cohort(bags, y)
        self._fit_feature_map(bags.features)
        torch.manual_seed(self.random_state)
        made: Callable[..., Any] = getattr(importlib.import_module("torchmil.models"), self.network)
        width = self._feature_map()(bags.features[:1]).shape[1]  # with n_components fewer
        embedding = torch.nn.Sequential(torch.nn.Linear(width, HIDDEN), torch.nn.ReLU())
        self.network_ = made(in_shape=(width,), feat_ext=embedding)
        target = torch.from_numpy(labels).float()
        rng = np.random.default_rng(self.random_state)
        with torch.enable_grad():
            optimizer = torch.optim.Adam(self.network_.parameters(), lr=RATE, weight_decay=DECAY)
            self.network_.train()
            for _ in range(self.max_epochs):
                for rows, x, mask in self._batches(bags, rng.permutation(len(bags))):
                    optimizer.zero_grad()
                    _, losses = self.network_.compute_loss(target[rows], x, mask)
                    torch.stack(list(losses.values())).sum().backward()
                    optimizer.step()

    def _batches(
        self, bags: Bags, order: Int[np.ndarray, " B"]
    ) -> Iterator[tuple[Int[np.ndarray, " b"], torch.Tensor, torch.Tensor]]:
        """Some bags at a time, padded, with a mask of what is there."""
        transform = self._feature_map()
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            pieces = [
                transform(bags.features[bags.offsets[b] : bags.offsets[b + 1]]).float()
                for b in rows
            ]
            x = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence(
                [torch.ones(len(piece)) for piece in pieces], batch_first=True
            )
            yield rows, x, mask

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(y_b = 0) of each bag, and zeros."""
        bags = self._check_predictable(bags)
        logit = np.empty(len(bags))
        self.network_.eval()
        with torch.no_grad():
            for rows, x, mask in self._batches(bags, np.arange(len(bags))):
                found = self.network_.predict(x, mask, return_inst_pred=False)
                logit[rows] = found.reshape(-1).numpy()
        return -np.logaddexp(0, logit), np.zeros(len(bags))
