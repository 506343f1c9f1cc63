"""Attention-based MIL (Ilse et al. 2018), plain and gated, with scores smoothed over neighbours.

Smoothing (smoothing.py) carries the coupling of VGPMIL-PR-I into attention: the scores s of a bag
become (I + alpha C)^-1 s before the softmax.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpmil.coupling.operator import check_strength
from gpmil.data.bags import Bags
from gpmil.models import saved_checks
from gpmil.models.base import InstancePredictions, instance_columns
from gpmil.models.batches import Batch
from gpmil.models.checks import count, flag, one_of, word_or_number
from gpmil.models.deep import DeepMIL, NetworkSettings
from gpmil.models.networks import Network, linear, segment_softmax, segment_sum
from gpmil.models.smoothing import Graphs

logger = logging.getLogger("gpmil")

FASTER = 30.0  # the learning rate of log alpha, over that of the weights: it has far to go
ATTENTION: dict[str, saved_checks.Shape] = {
    "attend.weight": ("attention_dim", "hidden_dim"),
    "attend.bias": ("attention_dim",),
    "score.weight": (1, "attention_dim"),
}
GATE: dict[str, saved_checks.Shape] = {
    "gate.weight": ("attention_dim", "hidden_dim"),
    "gate.bias": ("attention_dim",),
}
LOG_LIMIT = math.log(1e3)  # a learned alpha stays between 1e-3 and 1e3

# ------------------------------------------------------------------ the network


class AttentionNetwork(Network):
    """logit = w' sum_i a_i h_i + b, a = softmax over the bag of the (smoothed) scores.

    s_i = w_a' tanh(V h_i + v), gated: s_i = w_a' (tanh(V h_i + v) * sigmoid(U h_i + u)).
    """

    def __init__(
        self,
        n_inputs: int,
        hidden_dim: int,
        dropout: float,
        attention_dim: int,
        gated: bool,
        smooth: float,
        learn: bool,
        random: torch.Generator,
    ):
        super().__init__(n_inputs, hidden_dim, dropout, random)
        self.attend = linear(hidden_dim, attention_dim, random)  # V
        self.gate = linear(hidden_dim, attention_dim, random) if gated else None  # U
        self.score = linear(attention_dim, 1, random, bias=False)  # w_a
        self.classify = linear(hidden_dim, 1, random)
        self.smooth = smooth
        start = torch.tensor([math.log(smooth)], dtype=torch.float64) if learn else None
        self.log_alpha = None if start is None else nn.Parameter(start)

    def alpha(self) -> Float[Tensor, ""]:
        """The strength of the smoothing, >= 0."""
        if self.log_alpha is None:
            return torch.tensor(self.smooth, dtype=torch.float64)
        return self.log_alpha.reshape(()).clamp(-LOG_LIMIT, LOG_LIMIT).exp()

    def scores(self, h: Float[Tensor, "n h"], batch: Batch) -> Float[Tensor, " n"]:
        """s, smoothed over neighbours where the batch has graphs."""
        hidden = self.attend(h).tanh()
        if self.gate is not None:
            hidden = hidden * self.gate(h).sigmoid()
        s = self.score(hidden)[:, 0]
        return s if batch.smooth is None else batch.smooth(s, self.alpha())

    def attention(self, h: Float[Tensor, "n h"], batch: Batch) -> Float[Tensor, " n"]:
        """a, which sums to one over each bag."""
        return segment_softmax(self.scores(h, batch), batch.segment, len(batch))

    def forward(self, batch: Batch) -> Float[Tensor, " b"]:
        """One logit per bag."""
        h = self.embedding(batch.x)
        z = segment_sum(self.attention(h, batch)[:, None] * h, batch.segment, len(batch))
        return self.classify(z)[:, 0]

    def groups(self, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """A learned alpha has a rate of its own, and does not decay to one."""
        weights = [p for p in self.parameters() if p is not self.log_alpha]
        own = [{"params": weights, "lr": learning_rate, "weight_decay": weight_decay}]
        if self.log_alpha is None:
            return own
        return [*own, {"params": [self.log_alpha], "lr": FASTER * learning_rate, "weight_decay": 0}]


# ------------------------------------------------------------------ the estimator


@dataclass(kw_only=True, eq=False, repr=False)
class AttentionSettings(NetworkSettings):
    """And those of attention; `AttentionMIL` says what they mean."""

    gated: Any = False
    smooth: Any = 0.0
    smoothing: Any = "exact"
    attention_dim: Any = 64


class AttentionMIL(AttentionSettings, DeepMIL):
    """Attention-based MIL (Ilse et al. 2018), optionally gated and smoothed over neighbours.

    logit_b = w' sum_i a_i h_i + b with h_i = ReLU(W x_i + c) and a = softmax_i(s_i),
    s_i = w_a' tanh(V h_i + v). The weights a_i say what the bag's prediction looks at; they are no
    probabilities of a positive instance, and rank instances badly (`attention`).

    Parameters
    ----------
    gated : bool
        Multiply tanh(V h_i + v) by sigmoid(U h_i + u).
    smooth : float or "learn"
        alpha >= 0: the scores s of a bag become (I + alpha C)^-1 s before the softmax, C the
        Laplacian of its neighbour graph; 0 leaves them alone. "learn": alpha is trained with the
        weights, from 1. Bags without coordinates or edges run unsmoothed, which is said once.
    smoothing : "exact" or "approximate"
        Factor I + alpha C; or Chebyshev steps (small bags on a GPU: repeated squaring) to a
        relative error of 1e-6, which is faster for large bags, for a learned alpha and on a GPU.
    attention_dim : int
        Rows of V and U.
    **others
        As `MeanPoolMIL`.

    Attributes
    ----------
    smooth_ : float
        alpha, as learned or given; 0 where there is no neighbour graph.

    The others are those of `MeanPoolMIL`.

    Examples
    --------
    >>> from gpmil import simulate
    >>> bags = simulate.cohort(n_bags=12, n_features=16, seed=1)
    >>> model = AttentionMIL(gated=True, smooth=0.7, max_epochs=5, random_state=0).fit(bags)
    >>> model.predict_proba(bags).shape
    (12, 2)
    >>> a = model.attention(bags)
    >>> bool(np.allclose([piece.sum() for piece in bags.split(a)], 1))
    True
    >>> model.attention_table(bags).columns.tolist()
    ['bag', 'x', 'y', 'attention', 'times_even']
    """

    network_class = AttentionNetwork
    NUMBERS = DeepMIL.NUMBERS | {"smooth_": saved_checks.strength}
    smooth_: float

    def attention(self, bags) -> Float[np.ndarray, " N"]:
        """The attention weight of every instance; they sum to one over each bag."""
        return self._per_instance(
            self._check_predictable(bags),
            lambda network, batch: network.attention(network.embedding(batch.x), batch),
        )

    def attention_table(self, bags) -> pd.DataFrame:
        """A table with one row per instance: bag, position where known, and its weight.

        `attention` sums to one over a bag; `times_even` is it times the number of instances: 1 is
        what each would get if all were alike, so that maps of slides of any size can be compared.
        """
        weight = self.attention(bags)
        even = weight * bags.sizes[bags.bag_index]
        return pd.DataFrame({**instance_columns(bags), "attention": weight, "times_even": even})

    def predict_instances(self, bags) -> InstancePredictions:
        """Refused: an attention weight is not the probability of a label."""
        raise ValueError(
            "AttentionMIL has no probability for an instance: attention says what the bag's "
            "prediction looks at, it sums to one whatever the label and is no label probability. "
            "model.attention(bags) gives the weights; VGPMILPRI gives probabilities of instances."
        )

    def _architecture(self, bags: Bags) -> dict[str, Any]:
        self.smooth_ = self._start(bags)
        return super()._architecture(bags) | {
            "attention_dim": int(self.attention_dim),
            "gated": bool(self.gated),
            "smooth": self.smooth_,
            "learn": isinstance(self.smooth, str) and self.smooth_ > 0,
        }

    def _saved_architecture(self, n_inputs: int) -> dict[str, Any]:
        # smooth and learn depend on the bags, too: without neighbours there is no smoothing
        smooth = self.architecture_.get("smooth")
        learned = isinstance(self.smooth, str)
        return super()._saved_architecture(n_inputs) | {
            "attention_dim": int(self.attention_dim),
            "gated": bool(self.gated),
            "smooth": 0.0 if smooth == 0 else 1.0 if learned else float(self.smooth),
            "learn": learned and smooth != 0,
        }

    def _weight_shapes(self) -> dict[str, saved_checks.Shape]:
        shapes = super()._weight_shapes() | ATTENTION
        shapes |= GATE if self.gated else {}
        return shapes | ({"log_alpha": (1,)} if self.architecture_["learn"] else {})

    def _check_network(self, sizes: saved_checks.Symbols) -> None:
        super()._check_network(sizes)
        if not self.architecture_["learn"]:
            saved_checks.check_same("smooth_", self.smooth_, self.architecture_["smooth"])

    def _start(self, bags: Bags) -> float:
        """alpha before training; 0 where it has nothing to act on, which is said."""
        learned = isinstance(self.smooth, str)
        strength = 1.0 if learned else check_strength(float(self.smooth))
        if strength > 0 and not bags.has_geometry:
            logger.warning(
                "the bags have neither coordinates nor edges: attention runs unsmoothed (smooth 0 "
                "instead of %s). Give coords= or edges= to smooth over neighbours.",
                "a learned one" if learned else f"{strength:g}",
            )
            return 0.0
        if learned and not bags.adjacency.nnz:
            logger.warning("no two instances are neighbours: attention runs unsmoothed.")
            return 0.0
        return strength

    def _keep(self, network: Any) -> None:
        super()._keep(network)
        self.smooth_ = float(network.alpha().detach())

    def _graphs(self, bags: Bags, device: torch.device, training: bool) -> Graphs | None:
        if self.smooth_ == 0:
            return None
        if not bags.has_geometry:
            logger.warning(
                "these bags have neither coordinates nor edges: their attention is not smoothed, "
                "though the model was fitted with smooth %g.",
                self.smooth_,
            )
            return None
        exact = self.smoothing == "exact"
        again = training and not self.architecture_["learn"]  # one alpha, every epoch
        return Graphs(bags.adjacency, bags.offsets, device, exact, fixed=again)

    def _check_settings(self) -> None:
        super()._check_settings()
        flag("gated", self.gated)
        word_or_number("smooth", self.smooth, ("learn",), least=0)
        one_of("smoothing", self.smoothing, ("exact", "approximate"))
        count("attention_dim", self.attention_dim, least=1)
