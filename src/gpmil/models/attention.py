"""Attention-based MIL (Ilse et al. 2018), plain and gated, with scores smoothed over neighbours.

Smoothing carries the coupling of VGPMIL-PR-I into attention: the scores s of a bag, before the
softmax, become (I + alpha C)^-1 s, the minimiser of |t - s|^2 + alpha t'C t, with C the Laplacian
of the bag's neighbour graph. The operator is symmetric, so its own transpose in the gradient.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpmil.bags import Bags
from gpmil.coupling import DENSE_LIMIT, Coupling, check_strength, instance_rows, precision_matrix
from gpmil.models.base import InstancePredictions
from gpmil.models.checks import count, one_of, word_or_number
from gpmil.models.deep import (
    Batch,
    DeepMIL,
    Network,
    check_flag,
    linear,
    segment_softmax,
    segment_sum,
)

logger = logging.getLogger("gpmil")

Operator = Callable[[Tensor], Tensor]
TOLERANCE = 1e-6  # relative error of approximate smoothing
FASTER = 30.0  # the learning rate of log alpha, over that of the weights: it has far to go
LOG_LIMIT = math.log(1e3)  # a learned alpha stays between 1e-3 and 1e3
ROOM = 2**27  # numbers in the factors kept while training: 1 GiB

# ------------------------------------------------------------------ smoothing


class Smooth(torch.autograd.Function):
    """t = (I + alpha C)^-1 s and its derivatives, from the operator and C alone."""

    @staticmethod
    def forward(
        ctx: Any, s: Tensor, alpha: Tensor, sigma: Operator, laplacian: Operator | None
    ) -> Tensor:
        """Sigma s in float64, given back as s came."""
        t = sigma(s.double())
        ctx.sigma, ctx.laplacian, ctx.alpha = sigma, laplacian, alpha
        ctx.save_for_backward(t)
        return t.to(s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """g -> Sigma g for s, and -g' Sigma C Sigma s for alpha."""
        (t,) = ctx.saved_tensors
        back = ctx.sigma(grad.double())
        slope = None
        if ctx.needs_input_grad[1]:
            slope = -(back @ ctx.laplacian(t)).to(ctx.alpha)
        return back.to(grad), slope, None, None


def chebyshev(
    alpha: float,
    laplacian: Operator,
    largest: float,
    s: Float[Tensor, " n"],
    tolerance: float = TOLERANCE,
) -> Float[Tensor, " n"]:
    """(I + alpha C)^-1 s by Chebyshev iteration; `largest` bounds the eigenvalues of C.

    P = I + alpha C has its eigenvalues in [1, 1 + alpha largest] = [theta - delta, theta + delta];
    after k steps the error is at most |t| / T_k(theta / delta), which sets k beforehand.
    Every step is one product with the sparse C.
    """
    delta = alpha * largest / 2
    theta = 1 + delta
    if delta == 0:
        return s.clone()
    steps = math.ceil(math.acosh(1 / tolerance) / math.acosh(theta / delta))
    rho = delta / theta
    t, residual = torch.zeros_like(s), s
    step = residual / theta
    for _ in range(steps):
        t = t + step
        residual = residual - step - alpha * laplacian(step)
        # the three-term recurrence of T_k: rho_{k+1} = 1 / (2 theta / delta - rho_k)
        following = 1 / (2 * theta / delta - rho)
        step = following * (rho * step + (2 / delta) * residual)
        rho = following
    return t


class Graphs:
    """The neighbour graphs of a cohort, as smoothing operators for batches of its bags.

    `exact` factors I + alpha C (see `gpmil.coupling`); where alpha stays the same (`fixed`) the
    factors are kept for the next epochs. Otherwise Chebyshev steps: no factor, and the cost of
    some products with the sparse C.
    """

    def __init__(
        self,
        adjacency: sp.csr_array,
        offsets: Int[np.ndarray, " edges"],
        device: torch.device,
        exact: bool = True,
        fixed: bool = False,
    ):
        self.adjacency, self.offsets, self.device = adjacency, offsets, device
        self.exact, self.fixed = exact, fixed
        self.kept: dict[int, Coupling] = {}
        self.room = ROOM

    def smooth(
        self, s: Float[Tensor, " n"], alpha: Float[Tensor, ""], bags: Int[np.ndarray, " b"]
    ) -> Float[Tensor, " n"]:
        """(I + alpha C_b)^-1 s_b of some bags, differentiable in s and, unless fixed, alpha."""
        strength = float(alpha.detach())
        if self.exact and self.fixed:
            return Smooth.apply(s, alpha, self._by_kept_factors(bags, strength), None)
        rows = instance_rows(self.offsets, bags)
        block = sp.csr_array(self.adjacency[rows][:, rows])
        laplacian = _laplacian(block, self.device)
        if self.exact:
            offsets = np.concatenate([[0], np.cumsum(self._sizes(bags))])
            sigma = Coupling(block, offsets, strength, self.device).apply
        else:
            # Gershgorin: no eigenvalue of C exceeds twice the largest degree
            largest = 2 * float(block.sum(axis=1).max())
            sigma = partial(chebyshev, strength, laplacian, largest)
        return Smooth.apply(s, alpha, sigma, laplacian)

    def _sizes(self, bags: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
        return self.offsets[bags + 1] - self.offsets[bags]

    def _by_kept_factors(self, bags: Int[np.ndarray, " b"], alpha: float) -> Operator:
        factors = [self._factor(int(b), alpha) for b in bags]
        sizes = self._sizes(bags).tolist()

        def sigma(s: Tensor) -> Tensor:
            pieces = zip(factors, s.split(sizes), strict=True)
            return torch.cat([factor.apply(piece) for factor, piece in pieces])

        return sigma

    def _factor(self, bag: int, alpha: float) -> Coupling:
        if bag in self.kept:
            return self.kept[bag]
        start, stop = self.offsets[bag : bag + 2].tolist()
        own = sp.csr_array(self.adjacency[start:stop, start:stop])
        factor = Coupling(own, np.array([0, stop - start]), alpha, self.device)
        # a dense inverse, or two bands about as wide as the slide
        cost = (stop - start) * min(stop - start, 2 * DENSE_LIMIT)
        if cost <= self.room:
            self.kept[bag] = factor
            self.room -= cost
        return factor


def _laplacian(adjacency: sp.csr_array, device: torch.device) -> Operator:
    """x -> C x, as (I + C) x - x."""
    shifted = precision_matrix(adjacency, 1.0, device)
    return lambda x: shifted @ x - x


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
        return self.log_alpha[0].clamp(-LOG_LIMIT, LOG_LIMIT).exp()

    def scores(self, h: Float[Tensor, "n h"], batch: Batch) -> Float[Tensor, " n"]:
        """s, smoothed over neighbours where the batch has graphs."""
        hidden = self.attend(h).tanh()
        if self.gate is not None:
            hidden = hidden * self.gate(h).sigmoid()
        s = self.score(hidden)[:, 0]
        return s if batch.graphs is None else batch.graphs.smooth(s, self.alpha(), batch.bags)

    def attention(self, h: Float[Tensor, "n h"], batch: Batch) -> Float[Tensor, " n"]:
        """a, which sums to one over each bag."""
        return segment_softmax(self.scores(h, batch), batch.segment, len(batch))

    def forward(self, batch: Batch) -> Float[Tensor, " b"]:
        """One logit a bag."""
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


class AttentionMIL(DeepMIL):
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
        Factor I + alpha C; or Chebyshev steps to a relative error of 1e-6, which is faster for
        large bags, for a learned alpha and on a GPU.
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
    """

    network_class = AttentionNetwork
    _own_numbers = ("smooth_",)
    smooth_: float

    def __init__(
        self,
        *,
        gated=False,
        smooth=0.0,
        smoothing="exact",
        hidden_dim=128,
        attention_dim=64,
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
        super().__init__(
            hidden_dim=hidden_dim,
            dropout=dropout,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            max_epochs=max_epochs,
            batch_size=batch_size,
            validation=validation,
            patience=patience,
            class_weight=class_weight,
            standardize=standardize,
            n_components=n_components,
            random_state=random_state,
            device=device,
            dtype=dtype,
            verbose=verbose,
        )
        self.gated = gated
        self.smooth = smooth
        self.smoothing = smoothing
        self.attention_dim = attention_dim

    def attention(self, bags) -> Float[np.ndarray, " N"]:
        """The attention weight of every instance; they sum to one over each bag."""
        bags = self._check_predictable(bags)
        found = np.empty(bags.n_instances)
        for network, batch in self._batches(bags):
            rows = slice(bags.offsets[batch.bags[0]], bags.offsets[batch.bags[-1] + 1])
            found[rows] = network.attention(network.embedding(batch.x), batch).cpu().numpy()
        return found

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
        check_flag("gated", self.gated)
        word_or_number("smooth", self.smooth, ("learn",), least=0)
        one_of("smoothing", self.smoothing, ("exact", "approximate"))
        count("attention_dim", self.attention_dim, least=1)
