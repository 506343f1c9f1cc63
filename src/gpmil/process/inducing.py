"""Where the inducing points Z go: k-means centres, half from positive, half from negative bags.

k-means on a sample of the instances: seeds by k-means++, then Lloyd's steps. A step needs of the
instances only the sum and the number nearest to each centre, so it can run where they are.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.fast import compiled, fused_spread, products
from gpmil.fast.lanes import in_lanes
from gpmil.process.features import FeatureMap, PlacedMap, Rows, take

logger = logging.getLogger("gpmil")
POINTS_PER_CENTRE = 256  # more change the inertia by less than one per cent
SEED_POINTS = 32  # a centre, among which k-means++ chooses its seeds
BLOCK = 2048  # points at a time
MAX_STEPS = 100
SETTLED = 2e-3  # relative gain of a step below which Lloyd stops: within 0.7 % of the end
SEEDS_SETTLED = 10  # times as much among the few points that only say where to start

Block = tuple[Tensor, Tensor | np.ndarray]  # some points, and the same as products take them


def kmeans_by_class(
    features: Rows,
    positive: Bool[np.ndarray, " N"],
    feature_map: FeatureMap,
    n_inducing: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> Float[np.ndarray, "M D"]:
    """Inducing points in raw feature space; `positive` says which instances lie in positive bags.

    A class with fewer instances than centres gives them all, said once.
    """
    classes = {"positive": np.flatnonzero(positive), "negative": np.flatnonzero(~positive)}
    wanted = shares(n_inducing, {name: len(rows) for name, rows in classes.items()})
    centres = []
    for name, rows in classes.items():
        chosen = sample(len(rows), wanted[name], seed)
        x = Inputs(*held(features, rows[chosen]), feature_map.on(device))
        centres.append(kmeans(x, wanted[name], seed))
    return feature_map.inverse(np.concatenate(centres))


def shares(n_inducing: int, sizes: dict[str, int]) -> dict[str, int]:
    """How many centres each class gets; says once where it has fewer instances."""
    wanted = {"positive": n_inducing - n_inducing // 2, "negative": n_inducing // 2}
    short = {name: n for name, n in sizes.items() if n < wanted[name]}
    if short:
        logger.warning(
            "%d inducing points were asked for, half in positive and half in negative bags; there "
            "are only %s instances: all of them are used.",
            n_inducing,
            " and ".join(f"{n} {name}" for name, n in short.items()),
        )
    return wanted


def sample(n: int, k: int, seed: int) -> Int[np.ndarray, " m"]:
    """Which of n instances k-means looks at, in order."""
    most = POINTS_PER_CENTRE * k
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, most, replace=False))


def held(features: Rows, rows: Int[np.ndarray, " m"]) -> tuple[Rows, Int[np.ndarray, " m"]]:
    """Features in memory where they are; of a file these rows alone, which is read once."""
    if not isinstance(features, np.memmap):
        return features, rows
    return np.array(take(features, torch.from_numpy(rows))), np.arange(len(rows))


@dataclass(frozen=True)
class Inputs:
    """Kernel inputs of some rows, made when they are asked for."""

    features: Rows
    rows: Int[np.ndarray, " m"]
    feature_map: PlacedMap

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice | Int[np.ndarray, " n"]) -> Float[Tensor, "n d"]:
        return self.feature_map(take(self.features, torch.from_numpy(self.rows[which])))

    def about(self, which: slice, origin: Float[Tensor, " d"]) -> Block | None:
        """As in `in_blocks`, in one look at the features; None where that is not compiled.

        Inputs in float64 are written nowhere: twice as fast.
        """
        (mean, scale, components), x, loop = self.feature_map, self.features, compiled.centres()
        if components is not None or mean.is_cuda or loop is None:
            return None
        if not isinstance(x, np.ndarray) or x.dtype != np.float32:
            return None
        columns = (a.numpy() for a in (mean, scale, origin))
        part, panels = loop.about(np.ascontiguousarray(x[self.rows[which]]), *columns)
        return torch.from_numpy(part), panels


Points = Tensor | Inputs


def inputs(
    features: Rows, rows: Int[np.ndarray, " m"], feature_map: FeatureMap, device: str | torch.device
) -> Float[Tensor, "m d"]:
    """Kernel inputs of some rows."""
    return Inputs(features, rows, feature_map.on(device))[:]


def kmeans(x: Points, k: int, seed: int) -> Float[np.ndarray, "m d"]:
    """At most k centres of the points x; all points where there are no more than k."""
    if len(x) <= k:
        return x[:].cpu().numpy()
    few = x[seed_points(len(x), k, seed)]
    origin = few.mean(0)
    centres = seeds(few - origin, k, seed)
    blocks = in_blocks(x, origin)
    centres = lloyd(lambda at: tally_all(blocks, at), centres, square(blocks))
    # repeated points: fewer centres
    return distinct((centres + origin).cpu().numpy())


def distinct(centres: Float[np.ndarray, "k d"]) -> Float[np.ndarray, "m d"]:
    """Without repetitions, in the order they came: sorting would hang on last digits."""
    if len(np.unique(centres[:, 0])) == len(centres):  # soon known, and nearly always so
        return centres
    _, first = np.unique(centres, axis=0, return_index=True)
    return centres[np.sort(first)]


def seeds(few: Float[Tensor, "n d"], k: int, seed: int) -> Float[Tensor, "k d"]:
    """Where Lloyd's steps start: at the centres of a few points, which are soon found."""
    few = few.float()
    start, blocks = spread(few, k, seed), in_blocks(few)
    return lloyd(lambda at: tally_all(blocks, at), start, square(blocks), SEEDS_SETTLED * SETTLED)


def in_blocks(x: Points, origin: Float[Tensor, " d"] | None = None) -> list[Block]:
    """Points about an origin some at a time, each with what products take.

    In float32: half the time, and next to the same centres.
    """
    origin = torch.zeros_like(x[:1][0]) if origin is None else origin
    n = max(len(x), 1)  # a partition without points has one block
    size = n if origin.is_cuda else BLOCK
    return [_block(x, slice(start, start + size), origin) for start in range(0, n, size)]


def _block(x: Points, which: slice, origin: Float[Tensor, " d"]) -> Block:
    made = x.about(which, origin) if isinstance(x, Inputs) else None
    if made is not None:
        return made
    part = (x[which] - origin).float()
    loop = None if part.is_cuda else compiled.centres()
    return part, products.ready(part) if loop is None else loop.panels(part.numpy())


def square(blocks: Sequence[Block]) -> float:
    """The sum of |x|^2 over all points."""
    return sum(float(part.square().sum()) for part, _ in blocks)


def tally_all(blocks: Sequence[Block], centres: Float[Tensor, "k d"]) -> "Tally":
    """`tally` of all points."""
    return in_lanes(
        blocks,
        lambda lane: functools.reduce(merge, (tally(*block, centres) for block in lane)),
        merge,
        side_by_side=not centres.is_cuda,
    )


def seed_points(n: int, k: int, seed: int) -> Int[np.ndarray, " m"]:
    """Which of n points k-means++ chooses among."""
    most = min(n, SEED_POINTS * k)
    return np.sort(np.random.default_rng([seed, 1]).choice(n, most, replace=False))


def spread(x: Float[Tensor, "n d"], k: int, seed: int) -> Float[Tensor, "k d"]:
    """Greedy k-means++: of a few points drawn by squared distance, the one that helps most."""
    random = np.random.default_rng([seed, 2])
    square, first = x.square().sum(1), int(random.integers(len(x)))
    draws = torch.from_numpy(random.random((k - 1, 2 + int(np.log(k))))).to(x)
    found = fused_spread.chosen(x, first, draws)
    if found is None:
        found = _compiled_spread(x, square, first, draws)
    if found is not None:
        return x[found]
    chosen = [torch.tensor([first], device=x.device)]
    nearest = _squared_distances(x, square, chosen[0])[0]
    for u in draws:
        mass = nearest.cumsum(0)
        drawn = torch.searchsorted(mass, mass[-1] * u).clamp_(max=len(x) - 1)
        after = torch.minimum(nearest, _squared_distances(x, square, drawn))
        best = after.sum(1).argmin()[None]
        chosen.append(drawn[best])
        nearest = after[best][0]
    return x[torch.cat(chosen)]


def _compiled_spread(
    x: Float[Tensor, "n d"], square: Float[Tensor, " n"], first: int, draws: Float[Tensor, "k1 t"]
) -> Int[Tensor, " k"] | None:
    """The same points in one loop; None where it is not compiled."""
    loop = None if x.is_cuda else compiled.centres()
    if loop is None:
        return None
    points, norms, u = x.numpy(), square.numpy(), draws.numpy()
    return torch.from_numpy(loop.spread(points, loop.panels(points), norms, first, u))


def _squared_distances(
    x: Float[Tensor, "n d"], square: Float[Tensor, " n"], to: Int[Tensor, " t"]
) -> Float[Tensor, "t n"]:
    """|x - z|^2 = |x|^2 - 2 x'z + |z|^2."""
    found = torch.addmm(square, x[to], x.mT, alpha=-2)
    return found.add_(square[to][:, None]).clamp_(min=0)


class Tally(NamedTuple):
    """What Lloyd's step needs of some points, given the centres."""

    sums: Float[Tensor, "k d"]  # of the points nearest to each centre, in float64 as all here
    counts: Float[Tensor, " k"]
    distance: Float[Tensor, ""]  # sum of |x - z|^2 - |x|^2, z the nearest centre


def tally(
    x: Float[Tensor, "n d"], ready: Tensor | np.ndarray, centres: Float[Tensor, "k d"]
) -> Tally:
    """Every point to its nearest centre."""
    square = centres.square().sum(1)
    if isinstance(ready, np.ndarray):
        loop, arrays = compiled.centres(), (a.numpy() for a in (centres, square))
        sums, counts, total = loop.tally(x.numpy(), ready, *arrays)
        return Tally(
            torch.from_numpy(sums),
            torch.from_numpy(counts),
            torch.tensor(total, dtype=torch.float64),
        )
    # |x - z|^2 - |x|^2 = |z|^2 - 2 x'z
    distance = products.affine(ready, -2 * centres, square)
    least, nearest = distance.min(1)
    # in float64: the mean of equal points is the point
    sums = torch.zeros_like(centres, dtype=torch.float64).index_add_(0, nearest, x.double())
    one = sums.new_ones(1)  # bincount would wait for a GPU
    counts = sums.new_zeros(len(centres)).index_add_(0, nearest, one.expand(len(x)))
    return Tally(sums, counts, least.double().sum())


def merge(a: Tally, b: Tally) -> Tally:
    """Both together."""
    return Tally(a.sums + b.sums, a.counts + b.counts, a.distance + b.distance)


def lloyd(
    every: Callable[[Float[Tensor, "k d"]], Tally],
    centres: Float[Tensor, "k d"],
    square: float,
    settled: float | None = None,
) -> Float[Tensor, "k d"]:
    """Centres moved to the mean of their points until a step gains less than `settled`.

    `every(centres)` is the tally of all points, `square` the sum of their |x|^2.
    """
    before, settled = torch.inf, SETTLED if settled is None else settled
    for _ in range(MAX_STEPS):
        found = every(centres)
        # a centre without points stays
        moved = (found.sums / found.counts.clamp(min=1)[:, None]).to(centres)
        centres = torch.where(found.counts[:, None] > 0, moved, centres)
        inertia = square + float(found.distance)
        if before - inertia <= settled * inertia:
            break
        before = inertia
    return centres
