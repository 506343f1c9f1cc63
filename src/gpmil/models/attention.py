"""Attention-based MIL (Ilse et al. 2018), plain and gated, with scores smoothed over neighbours.

Smoothing carries the coupling of VGPMIL-PR-I into attention: the scores s of a bag, before the
softmax, become (I + alpha C)^-1 s, the minimiser of |t - s|^2 + alpha t'C t, with C the Laplacian
of the bag's neighbour graph. The operator is symmetric, so its own transpose in the gradient.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpmil.coupling.operator import (
    DENSE_LIMIT,
    Coupling,
    Edges,
    Precision,
    check_strength,
    instance_rows,
)
from gpmil.data.bags import Bags
from gpmil.data.graphs import laplacian
from gpmil.models import saved_checks
from gpmil.models.base import InstancePredictions
from gpmil.models.checks import count, one_of, require_numbers, word_or_number
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
Smoothing = Callable[[Tensor, Tensor], Tensor]
TOLERANCE = 1e-6  # relative error of approximate smoothing
FASTER = 30.0  # the learning rate of log alpha, over that of the weights: it has far to go
LOG_LIMIT = math.log(1e3)  # a learned alpha stays between 1e-3 and 1e3
ROOM = 2**27  # numbers in the factors kept while training: 1 GiB
PADDED = 2**21  # entries of the padded Laplacians of a batch, up to which a GPU multiplies them out

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
        residual = torch.sub(residual - step, laplacian(step), alpha=alpha)
        # the three-term recurrence of T_k: rho_{k+1} = 1 / (2 theta / delta - rho_k)
        following = 1 / (2 * theta / delta - rho)
        step = torch.add(following * rho * step, residual, alpha=2 * following / delta)
        rho = following
    return t


def squared(
    alpha: float, C: Float[Tensor, "b p p"], largest: float, tolerance: float = TOLERANCE
) -> Float[Tensor, "b p p"]:
    """(I + alpha C)^-1 of many small Laplacians by repeated squaring, all of them at once.

    With theta = 1 + alpha largest / 2 the norm of E = I - (I + alpha C) / theta is at most
    rho = 1 - 1 / theta, and (I + alpha C)^-1 = sum_j E^j / theta, where
    sum_{j < 2^k} E^j = (I + E)(I + E^2)(I + E^4)... with k factors, short of the whole by a
    relative rho^(2^k). A few large products: on a GPU less than many with a vector.
    """
    theta = 1 + alpha * largest / 2
    rho = 1 - 1 / theta
    E = -alpha / theta * C
    E.diagonal(dim1=1, dim2=2).add_(rho)
    sigma = E / theta
    sigma.diagonal(dim1=1, dim2=2).add_(1 / theta)
    rate = -math.log1p(-1 / theta) if theta > 1 else math.inf  # -log rho
    n_factors = math.ceil(math.log2(-math.log(tolerance) / rate)) if rate < math.inf else 1
    for _ in range(n_factors - 1):
        E = torch.bmm(E, E)
        sigma = torch.baddbmm(sigma, sigma, E)
    return sigma


class Graphs:
    """The neighbour graphs of a cohort, as smoothing operators for batches of its bags.

    `exact` factors I + alpha C (see `gpmil.coupling`); where alpha stays the same (`fixed`) the
    factors are kept for the next epochs. Otherwise Chebyshev steps: no factor, and the cost of
    some products with the sparse C; small bags on a GPU by repeated squaring.
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
        self.edge_offsets = adjacency.indptr[offsets].astype(np.int64)  # a bag's edges lie together
        self.degree = np.asarray(adjacency.sum(axis=1)).ravel()
        self.C: sp.csr_array | None = None
        if device.type == "cuda" and not exact:
            self.C = laplacian(adjacency)
        self.kept: dict[int, Coupling] = {}
        self.room = ROOM

    def batches(self, parts: Sequence[np.ndarray]) -> Iterator[Smoothing]:
        """(s, alpha) -> (I + alpha C_b)^-1 s_b for each part of the bags."""
        for bags, padded in zip(parts, self._side_by_side(parts), strict=True):
            yield partial(self._smooth, bags, padded)

    def smooth(
        self, s: Float[Tensor, " n"], alpha: Float[Tensor, ""], bags: Int[np.ndarray, " b"]
    ) -> Float[Tensor, " n"]:
        """(I + alpha C_b)^-1 s_b of some bags, differentiable in s and, unless fixed, alpha."""
        return next(self.batches([bags]))(s, alpha)

    def _smooth(
        self, bags: Int[np.ndarray, " b"], padded: "Padded | None", s: Tensor, alpha: Tensor
    ) -> Tensor:
        strength = float(alpha.detach())
        if self.exact and self.fixed:
            return Smooth.apply(s, alpha, self._by_kept_factors(bags, strength), None)
        # Gershgorin: no eigenvalue of C exceeds twice the largest degree
        largest = 2 * float(self.degree[instance_rows(self.offsets, bags)].max())
        if padded is not None:
            C = padded.laplacians()
            inverse = squared(strength, C, largest)
            return Smooth.apply(s, alpha, padded.operator(inverse), padded.operator(C))
        block = self._block(bags)
        product = _product(block, self.device)
        if self.exact:
            offsets = np.concatenate([[0], np.cumsum(self._sizes(bags))])
            factors = Coupling(block, offsets, strength, self.device)
            return Smooth.apply(s, alpha, factors.apply, product)
        return Smooth.apply(s, alpha, partial(chebyshev, strength, product, largest), product)

    def _side_by_side(self, parts: Sequence[np.ndarray]) -> Iterator["Padded | None"]:
        """The bags of each part padded to one size; None where they are too large for that."""
        if self.C is None:
            yield from repeat(None, len(parts))
            return
        bags, counts = np.concatenate(parts), np.array([len(part) for part in parts])
        sizes, first = self._sizes(bags), np.cumsum(counts) - counts
        longest = np.maximum.reduceat(sizes, first)
        p = np.repeat(longest, counts)
        rows = instance_rows(self.offsets, bags)
        number = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # in the bag
        of_bag = np.arange(len(bags)) - np.repeat(first, counts)  # in the part
        place = np.repeat(of_bag * p, sizes) + number
        # the entries of C in the rows of a bag lie together, their columns are of the same bag
        start = self.C.indptr.astype(np.int64)
        entries = instance_rows(start[self.offsets], bags)
        n_entries = start[self.offsets[bags + 1]] - start[self.offsets[bags]]
        row = np.repeat(place, start[rows + 1] - start[rows])
        column = self.C.indices[entries] - np.repeat(self.offsets[bags], n_entries)
        where = row * np.repeat(p, n_entries) + column
        of_rows, of_entries = (np.add.reduceat(n, first).tolist() for n in (sizes, n_entries))
        pieces = zip(
            self._moved(place, of_rows),
            self._moved(where, of_entries),
            self._moved(self.C.data[entries], of_entries),
            strict=True,
        )
        for b, size, piece in zip(counts.tolist(), longest.tolist(), pieces, strict=True):
            yield Padded((b, size), *piece) if b * size**2 <= PADDED else None

    def _moved(self, array: np.ndarray, counts: list[int]) -> tuple[Tensor, ...]:
        return torch.from_numpy(array).to(self.device).split(counts)

    def _block(self, bags: Int[np.ndarray, " b"]) -> sp.csr_array:
        """The adjacency of some bags alone: their edges, columns moved along with their rows."""
        rows, edges = (instance_rows(o, bags) for o in (self.offsets, self.edge_offsets))
        sizes, n_edges = self._sizes(bags), self.edge_offsets[bags + 1] - self.edge_offsets[bags]
        shift = np.cumsum(sizes) - sizes - self.offsets[bags]
        columns = self.adjacency.indices[edges] + np.repeat(shift, n_edges)
        first, data = self.adjacency.indptr, self.adjacency.data[edges]
        starts = np.concatenate([[0], np.cumsum(first[rows + 1] - first[rows])])
        return sp.csr_array((data, columns, starts), shape=(len(rows),) * 2)

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


def _product(adjacency: sp.csr_array, device: torch.device) -> Operator:
    """x -> C x = diag(A 1) x - A x."""
    edges = Edges.of(adjacency, device)
    A = Precision.of(edges, slice(0, adjacency.shape[0]), 1.0).neighbours
    return lambda x: torch.addmv(edges.degree * x, A, x, alpha=-1)


class Padded(NamedTuple):
    """The Laplacians of some bags as matrices, padded with zeros to one size."""

    shape: tuple[int, int]  # b bags of p places
    place: Int[Tensor, " n"]  # of every instance among the b x p
    where: Int[Tensor, " e"]  # of the entries that are not zero among the b x p x p
    value: Float[Tensor, " e"]

    def laplacians(self) -> Float[Tensor, "b p p"]:
        """C of every bag."""
        b, p = self.shape
        return self.value.new_zeros(b * p * p).index_copy_(0, self.where, self.value).view(b, p, p)

    def operator(self, matrix: Float[Tensor, "b p p"]) -> Operator:
        """x -> M_b x_b, bag by bag."""
        b, p = self.shape

        def apply(x: Tensor) -> Tensor:
            apart = x.new_zeros(b * p).index_copy_(0, self.place, x).view(b, p, 1)
            return torch.bmm(matrix, apart).view(-1).index_select(0, self.place)

        return apply


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
    """

    network_class = AttentionNetwork
    _own_numbers = ("smooth_",)
    CHECKS = DeepMIL.CHECKS | saved_checks.SMOOTHING
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
        require_numbers(found)
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
        shapes = super()._weight_shapes() | saved_checks.ATTENTION
        shapes |= saved_checks.GATE if self.gated else {}
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
        check_flag("gated", self.gated)
        word_or_number("smooth", self.smooth, ("learn",), least=0)
        one_of("smoothing", self.smoothing, ("exact", "approximate"))
        count("attention_dim", self.attention_dim, least=1)
