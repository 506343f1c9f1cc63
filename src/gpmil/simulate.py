"""Cohorts with known truth: slides drawn to look like prostate biopsies, every patch label known.

A slide is one to three curved tissue cores on a patch lattice (more on large slides), with a
ragged outline, sometimes holes, sometimes a core off the common lattice. A positive slide holds
one or two connected lesions, from a single patch to half the slide. Features overlap between the
classes, shift from slide to slide (stain) and are correlated between neighbours beyond what the
label explains.

Sizes, shapes and the features' correlations follow SICAPv2 (`Settings` says what was matched). The
overlap of the classes was set with one yardstick only: a logistic regression trained on the true
patch labels of other slides has an AUC of about .95. All of it was fixed before any multiple
instance model was run on these cohorts, and is not to be adjusted so that a finding comes true.

Every slide has its own seed (cohort seed, part, index): given its label, slide `i` has the same
bits whatever the size of the cohort, the chunk it is streamed in, or the order of drawing. Its
label and its patient come from the cohort's roster, which has an exact number of positives.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, dijkstra
from scipy.spatial import KDTree

from gpmil.data.bags import Bags

Number = float | int  # run-time type checks tell them apart; 2 is as good as 2.0

# Names of the random streams of one cohort seed (spawn keys, so that they never meet).
_POPULATION, _ROSTER, _PATIENT, _SLIDE = range(4)

_SMALLEST_CORE = 5  # patches; fewer would be a crumb, not a core
_LONGEST_CORE = 70  # patches of 256 microns: a biopsy core is not longer than about 18 mm
_GAP = 2  # free lattice rows between two cores: no contact, even with a core off the lattice


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set about a simulated slide; the defaults are the fixed ones.

    Matched to SICAPv2, there (here, with the defaults): patches a slide, mean 121 (121), median
    118 (112), standard deviation 58 (60), largest of 155 slides 347 (about 320); connected
    pieces a slide, mean 1.54 (1.46); neighbours a patch, mean 3.04 (3.03); width of a core in
    patches, median 3.15 (3.17); length over width, median 5.2 (5.0); longer side of the slide in
    patches, median 33 (33); slides on more than one lattice 19 % (20 %); slides a patient, mean
    1.6 (1.4). Of 128 CNN features of 30 slides: zeros 52 % (51 %); correlation of neighbours
    within negative slides .28 (.25), of their leading components .2 to .5 (.2 to .5); share of
    the variance between slides .07 to .11 (.10).

    Not matched, on purpose: holes, of which SICAPv2 has nearly none at this patch size, and the
    malignant share of a positive slide, log-uniform from one patch to one half (median 6 %;
    SICAPv2: 54 %), so that small lesions are common and positive slides hard to tell.

    `separation` was set so that a logistic regression trained on the true patch labels of 60
    slides reaches a patch AUC of .95 on 60 others (.93 to .96 over eight seeds).

    Attributes
    ----------
    n_features
        features a patch, D.
    mean_size
        mean number of patches a slide (gamma distributed).
    size_shape
        shape of that gamma distribution; standard deviation = mean / sqrt(shape).
    min_size
        smallest number of patches a slide; smaller draws are raised to it.
    step
        pixels between neighbouring patches at level 0.
    core_width
        mean width of a core in patches.
    core_counts
        probabilities of one, two, three, ... cores on a slide.
    off_lattice
        chance that the last of several cores starts its own lattice.
    ragged
        roughness of the outline in patches.
    holes
        chance that a core has a hole.
    max_lesion
        largest share of a slide's patches that is malignant.
    second_lesion
        chance that the malignant patches are split over two lesions, which may meet.
    n_latent
        dimension of the space of appearances, embedded in the D features.
    decay
        ratio of the scales of successive latent dimensions in the features.
    separation
        distance of malignant from benign tissue along the common cancer direction.
        Sets the difficulty.
    mimic
        share of that distance at which the benign type that resembles cancer lies.
    type_spread
        distance of the tissue types from the centre of their class.
    type_length
        correlation length, in patches, of the fields that lay out the types.
    grain
        standard deviation of what differs from patch to patch, a latent dimension; the
        unit of all latent distances at its default.
    texture
        standard deviation of the spatially correlated part, a latent dimension.
    texture_length
        its correlation length in patches.
    stain
        standard deviation of the slide's shift, a latent dimension.
    patient_share
        share of the shift's variance that a patient's slides have in common.
    noise
        standard deviation of the white noise, a feature.
    field_effect
        share of the separation by which benign patches that touch a lesion are
        moved towards cancer. At 0 the benign patches of positive and negative slides have
        one distribution; above 0 they do not.
    patient_sizes
        probabilities of one, two, three, ... slides a patient.
    patient_risk
        share of the variance of a slide's risk that its patient explains. Slides
        with the highest risk are the positive ones, so most patients have slides of one
        class, and some have both.
    """

    n_features: int = 128
    mean_size: Number = 121.0
    size_shape: Number = 4.4
    min_size: int = 15
    step: int = 1024
    core_width: Number = 3.15
    core_counts: tuple[float, ...] = (0.75, 0.2, 0.05)
    off_lattice: Number = 0.75
    ragged: Number = 0.4
    holes: Number = 0.15
    max_lesion: Number = 0.5
    second_lesion: Number = 0.25
    n_latent: int = 12
    decay: Number = 0.85
    separation: Number = 4.0
    mimic: Number = 0.5
    type_spread: Number = 2.5
    type_length: Number = 4.0
    grain: Number = 1.0
    texture: Number = 1.0
    texture_length: Number = 2.0
    stain: Number = 0.5
    patient_share: Number = 0.5
    noise: Number = 0.3
    field_effect: Number = 0.0
    patient_sizes: tuple[float, ...] = (0.7, 0.2, 0.1)
    patient_risk: Number = 0.8

    def __post_init__(self) -> None:
        _check_settings(self)


class Slide(NamedTuple):
    """One simulated slide of n patches: features (n, D), coords (n, 2) in pixels, truth."""

    features: Float32[np.ndarray, "n d"]
    coords: Int[np.ndarray, "n 2"]  # x, y of the upper left corner at level 0
    instance_labels: Int[np.ndarray, " n"]  # 1 malignant, 0 benign
    label: int


@dataclass(frozen=True)
class Population:
    """What all slides of a cohort share: the appearance of the tissue types (q latent dims)."""

    settings: Settings
    benign: Float[np.ndarray, "benign_types q"]
    malignant: Float[np.ndarray, "malignant_types q"]
    cancer: Float[np.ndarray, " q"]  # separation x the common cancer direction
    embedding: Float[np.ndarray, "q d"]  # orthogonal rows of decreasing length
    base: Float[np.ndarray, " d"]


# ---------------------------------------------------------------------------------- tissue
def _smooth_fields(
    rng: np.random.Generator, at: np.ndarray, length: float, count: int
) -> Float[np.ndarray, "n count"]:
    """Independent smooth Gaussian fields of unit variance at the given positions (n, 2).

    Covariance exp(-r^2 / 2 length^2), by 64 random frequencies: no canvas, hence no borders.
    """
    frequencies = rng.standard_normal((2, 64)) / length
    phase = at @ frequencies
    waves = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
    return waves @ rng.standard_normal((128, count)) / 8.0


def _centreline(rng: np.random.Generator, length: float) -> Float[np.ndarray, "points 2"]:
    """A gently bending line of the given length, in patches, with a point every half patch."""
    along = np.arange(0.0, max(length, 0.5), 0.5)
    turns = rng.uniform(0.3, 1.0) * along / along.size * 2 + rng.random()
    heading = rng.uniform(0, np.pi) + 0.7 * rng.standard_normal() * np.sin(2 * np.pi * turns)
    return 0.5 * np.cumsum(np.stack([np.sin(heading), np.cos(heading)], axis=1), axis=0)


def _carve_hole(
    rng: np.random.Generator,
    cells: Float[np.ndarray, "cells 2"],
    line: Float[np.ndarray, "points 2"],
    cost: Float[np.ndarray, " cells"],
) -> None:
    """Change `cost` for a hole of one to nine cells on the line, with a wall of tissue round it."""
    centre = np.round(line[rng.integers(len(line) // 4, 3 * len(line) // 4 + 1)])
    reach = np.linalg.norm(cells - centre, axis=1) - rng.choice([0.0, 1.0, 1.5])
    cost[reach < 1.5] = -np.inf
    cost[reach <= 0.0] = np.inf


def _core(rng: np.random.Generator, n: int, settings: Settings) -> Int[np.ndarray, "n 2"]:
    """The n lattice cells (row, col) of one core: the cheapest by distance to a line + noise."""
    width = settings.core_width * np.exp(0.15 * rng.standard_normal())
    line = _centreline(rng, n / width - 1)
    # Twice the width leaves room for every outline; farther cells are not looked at.
    reach = width + 1
    low, high = np.floor(line.min(0) - reach), np.ceil(line.max(0) + reach)
    cells = np.indices((high - low + 1).astype(int)).reshape(2, -1).T + low
    cost, _ = KDTree(line).query(cells, distance_upper_bound=reach)
    cells, cost = cells[cost < np.inf], cost[cost < np.inf]
    cost += settings.ragged * _smooth_fields(rng, cells, 1.5, 1)[:, 0]
    if rng.random() < settings.holes and n >= 8 * _SMALLEST_CORE:
        _carve_hole(rng, cells, line, cost)
    chosen = np.sort(np.argpartition(cost, n - 1)[:n])
    return (cells[chosen] - cells[chosen].min(0)).astype(np.int64)


def _core_sizes(rng: np.random.Generator, settings: Settings) -> Int[np.ndarray, " cores"]:
    """Patches of every core of a slide; their sum is the slide's size."""
    scale = settings.mean_size / settings.size_shape
    n = max(settings.min_size, round(rng.gamma(settings.size_shape, scale)))
    cores = 1 + int(rng.choice(len(settings.core_counts), p=settings.core_counts))
    cores = max(cores, math.ceil(n / (_LONGEST_CORE * settings.core_width)))
    cores = max(1, min(cores, n // (2 * _SMALLEST_CORE)))
    least = min(n // cores, _SMALLEST_CORE)
    return least + rng.multinomial(n - cores * least, rng.dirichlet(np.full(cores, 3.0)))


def _tissue(
    rng: np.random.Generator, settings: Settings
) -> tuple[Int[np.ndarray, "n 2"], Int[np.ndarray, "n 2"]]:
    """Lattice cells (row, col) of a slide and the patches' corners (x, y) in pixels."""
    cores = [_core(rng, int(n), settings) for n in _core_sizes(rng, settings)]
    stack, top = int(rng.integers(2)), 0  # the cores lie below or beside one another
    for core in cores:
        core[:, stack] += top
        core[:, 1 - stack] += rng.integers(12)
        top = core[:, stack].max() + 1 + _GAP + rng.integers(8)
    cells = np.concatenate(cores)
    corners = cells[:, ::-1] * settings.step + rng.integers(0, 100 * settings.step, 2)
    if len(cores) > 1 and rng.random() < settings.off_lattice:
        # Between a quarter and three quarters of a step: no patch overlaps, none is contiguous.
        shift = rng.integers(settings.step // 4, 3 * settings.step // 4 + 1, 2)
        corners[-len(cores[-1]) :] += shift
    return cells, corners


def _neighbours(cells: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "edges 2"]:
    """Pairs of cells that share a side, each pair once."""
    index = np.full(cells.max(0) + 2, -1)
    index[tuple(cells.T)] = np.arange(len(cells))
    below, beside = (index[tuple((cells + offset).T)] for offset in ([1, 0], [0, 1]))
    pairs = np.stack([np.tile(np.arange(len(cells)), 2), np.concatenate([below, beside])], axis=1)
    return pairs[pairs[:, 1] >= 0]


# ---------------------------------------------------------------------------------- lesions
def _grow(
    rng: np.random.Generator, edges: Int[np.ndarray, "edges 2"], n: int, size: int
) -> Bool[np.ndarray, " n"]:
    """A connected region of `size` of the n cells (fewer where no piece holds so many).

    Growth from a random cell with exponential waiting times across every side: the cells that
    are reached first. Each is reached through an earlier one, so the region is connected.
    """
    waiting = rng.exponential(size=len(edges))
    graph = csr_matrix((waiting, edges.T), shape=(n, n))
    piece = connected_components(graph, directed=False)[1]
    room = np.minimum(np.bincount(piece)[piece], size)
    start = rng.choice(np.flatnonzero(room == room.max()))
    reached = dijkstra(graph, directed=False, indices=start)
    region = np.zeros(n, dtype=bool)
    region[np.argsort(reached)[: room.max()]] = True
    return region


def _lesions(
    rng: np.random.Generator, cells: Int[np.ndarray, "n 2"], settings: Settings
) -> Bool[np.ndarray, " n"]:
    """Which cells are malignant: one or two lesions, log-uniform size, at least one patch."""
    n, edges = len(cells), _neighbours(cells)
    largest = max(1, int(settings.max_lesion * n))
    size = min(largest, int(np.exp(rng.uniform(0, np.log(largest + 1)))))
    if size == 1 or rng.random() >= settings.second_lesion:
        return _grow(rng, edges, n, size)
    first = int(rng.integers(1, size))
    return _grow(rng, edges, n, first) | _grow(rng, edges, n, size - first)


# --------------------------------------------------------------------------------- features
def population(seed: int = 0, settings: Settings | None = None) -> Population:
    """What the slides of the cohort with this seed have in common.

    Four benign tissue types, one of which resembles cancer, and three malignant ones.
    """
    settings = Settings() if settings is None else settings
    rng = _generator(seed, _POPULATION)
    q, d = settings.n_latent, settings.n_features

    # Equal weight on all dimensions, and types across it: how hard the cohort is must not
    # hinge on the seed.
    cancer = rng.choice([-1.0, 1.0], q) / np.sqrt(q)

    def directions(count: int) -> Float[np.ndarray, "count q"]:
        drawn = rng.standard_normal((count, q))
        drawn -= np.outer(drawn @ cancer, cancer)
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    benign = settings.type_spread * directions(4)
    malignant = settings.type_spread * directions(3)
    cancer *= settings.separation
    benign[-1] += settings.mimic * cancer
    malignant += cancer
    scale = settings.decay ** np.arange(q)
    scale /= np.sqrt(np.mean(scale**2))
    embedding = scale[:, None] * np.linalg.qr(rng.standard_normal((d, q)))[0].T
    base = 0.2 * rng.standard_normal(d)
    return Population(settings, benign, malignant, cancer, embedding, base)


def _types(
    rng: np.random.Generator, cells: Int[np.ndarray, "n 2"], length: float, offsets: np.ndarray
) -> Int[np.ndarray, " n"]:
    """A tissue type for every cell: the highest of smooth fields with the slide's own levels."""
    level = offsets + rng.standard_normal(len(offsets))
    return np.argmax(_smooth_fields(rng, cells, length, len(offsets)) + level, axis=1)


def _features(
    rng: np.random.Generator,
    cells: Int[np.ndarray, "n 2"],
    lesion: Bool[np.ndarray, " n"],
    shift: Float[np.ndarray, " q"],
    population: Population,
) -> Float32[np.ndarray, "n d"]:
    """relu(base + (type mean + slide shift + texture + grain [+ field effect]) E + white noise)."""
    p, s = population, population.settings
    # The mimic is rarer than the other benign types.
    benign = p.benign[_types(rng, cells, s.type_length, np.array([0.0, 0.0, 0.0, -1.0]))]
    malignant = p.malignant[_types(rng, cells, s.type_length, np.zeros(3))]
    texture = s.texture * _smooth_fields(rng, cells, s.texture_length, s.n_latent)
    grain = s.grain * rng.standard_normal(texture.shape)
    noise = rng.standard_normal((len(cells), s.n_features), dtype=np.float32)
    latent = np.where(lesion[:, None], malignant, benign) + shift + texture + grain
    if s.field_effect:
        latent[_touching(cells, lesion)] += s.field_effect * p.cancer
    z = (latent @ p.embedding + p.base).astype(np.float32) + np.float32(s.noise) * noise
    return np.maximum(z, np.float32(0))


def _touching(
    cells: Int[np.ndarray, "n 2"], lesion: Bool[np.ndarray, " n"]
) -> Bool[np.ndarray, " n"]:
    """Benign cells that share a side with a malignant one."""
    edges = _neighbours(cells)
    touching = np.zeros(len(cells), dtype=bool)
    for a, b in (edges.T, edges[:, ::-1].T):
        touching[a[lesion[b]]] = True
    return touching & ~lesion


# ---------------------------------------------------------------------------------- cohorts
def _generator(seed: int, *key: int) -> np.random.Generator:
    """The random stream of this name; streams of different names are independent."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def slide(
    rng: np.random.Generator | np.random.SeedSequence | int,
    label: int,
    population: Population,
    patient_shift: Float[np.ndarray, " q"] | None = None,
) -> Slide:
    """One slide. The same seed gives the same tissue for either label: only the lesion differs.

    Parameters
    ----------
    rng
        a seed, a seed sequence or a generator.
    label
        1 for a slide with a lesion, 0 for one without.
    population
        what the slides of the cohort share.
    patient_shift
        the patient's part of the stain shift, standard normal; drawn if None.

    Examples
    --------
    >>> one = slide(7, label=1, population=population(seed=0))
    >>> one.features.shape[1], one.label, bool(one.instance_labels.any())
    (128, 1, True)
    """
    if label not in (0, 1):
        raise ValueError(f"label must be 0 or 1, got {label!r}")
    s = population.settings
    tissue, lesions, stain, features = np.random.default_rng(rng).spawn(4)
    cells, corners = _tissue(tissue, s)
    lesion = _lesions(lesions, cells, s) if label else np.zeros(len(cells), dtype=bool)
    own, drawn = stain.standard_normal((2, s.n_latent))
    patient = drawn if patient_shift is None else patient_shift
    shift = s.stain * (np.sqrt(1 - s.patient_share) * own + np.sqrt(s.patient_share) * patient)
    x = _features(features, cells, lesion, shift, population)
    return Slide(x, corners, lesion.astype(np.int64), label)


class _Roster(NamedTuple):
    """Who belongs to the cohort: the label and the patient of every slide."""

    labels: Int[np.ndarray, " bags"]
    patients: Int[np.ndarray, " bags"]


def _roster(seed: int, part: int, n_bags: int, n_positive: int, settings: Settings) -> _Roster:
    """Patients in order, with one to three slides each; the slides at highest risk are positive.

    Every draw is sequential, so a larger cohort begins with the patients of a smaller one.
    """
    sizes, patient, own = _generator(seed, _ROSTER, part).spawn(3)
    slides = 1 + sizes.choice(len(settings.patient_sizes), size=n_bags, p=settings.patient_sizes)
    patients = np.repeat(np.arange(n_bags), slides)[:n_bags]
    share = settings.patient_risk
    risk = np.sqrt(share) * patient.standard_normal(n_bags)[patients]
    risk += np.sqrt(1 - share) * own.standard_normal(n_bags)
    labels = np.zeros(n_bags, dtype=np.int64)
    labels[np.argsort(-risk)[:n_positive]] = 1
    return _Roster(labels, patients)


def _draw(indices: range, roster: _Roster, seed: int, part: int, population: Population) -> Bags:
    """The slides with these indices, as Bags."""
    q = population.settings.n_latent
    slides = []
    for i in indices:
        of_patient = _generator(seed, _PATIENT, part, int(roster.patients[i])).standard_normal(q)
        rng = _generator(seed, _SLIDE, part, i)
        slides.append(slide(rng, int(roster.labels[i]), population, of_patient))
    return Bags.from_arrays(
        [s.features for s in slides],
        labels=[s.label for s in slides],
        coords=[s.coords for s in slides],
        step=population.settings.step,
        graph="grid4",
        names=[f"slide-{part}-{i:05d}" for i in indices],
        groups=[f"patient-{part}-{roster.patients[i]:05d}" for i in indices],
        instance_labels=[s.instance_labels for s in slides],
    )


def stream(
    n_bags: int,
    n_positive: int | None = None,
    n_features: int = 128,
    seed: int = 0,
    part: int = 0,
    chunk: int = 256,
    **settings: Any,
) -> Iterator[Bags]:
    """A cohort in pieces of at most `chunk` slides, drawn one after the other.

    Parameters
    ----------
    n_bags
        slides in all.
    n_positive
        positive ones among them, exactly; half if None.
    n_features
        features a patch.
    seed
        the population (tissue types and their appearance) and everything drawn from it.
    part
        another part of the same population has other patients: a test set for part 0.
    chunk
        slides held in memory at a time.
    settings
        fields of `Settings`, where they differ from the defaults.

    Examples
    --------
    >>> [len(bags) for bags in stream(5, seed=1, chunk=2)]
    [2, 2, 1]
    """
    n_positive = n_bags // 2 if n_positive is None else n_positive
    _check_counts(n_bags, n_positive, seed, part, chunk)
    shared = population(seed, Settings(n_features=n_features, **settings))
    roster = _roster(seed, part, n_bags, n_positive, shared.settings)
    starts = range(0, n_bags, chunk)
    pieces = (range(start, min(start + chunk, n_bags)) for start in starts)
    return (_draw(piece, roster, seed, part, shared) for piece in pieces)


def cohort(
    n_bags: int = 60,
    n_positive: int | None = None,
    n_features: int = 128,
    seed: int = 0,
    part: int = 0,
    **settings: Any,
) -> Bags:
    """A whole cohort at once; the arguments are those of `stream`.

    Examples
    --------
    >>> bags = cohort(6, n_positive=2, n_features=32, seed=3)
    >>> len(bags), int(bags.labels.sum()), bags.features.shape[1]
    (6, 2, 32)
    """
    return next(stream(n_bags, n_positive, n_features, seed, part, max(n_bags, 1), **settings))


def sicapv2_like(seed: int = 0, **settings: Any) -> tuple[Bags, Bags]:
    """Training and test cohort in the numbers of the SICAPv2 experiment.

    95 slides (70 positive) and 31 slides (25 positive) of other patients, about 15 and 5
    thousand patches. The published counts, 162 patches a slide, list malignant patches twice;
    distinct patches are 121 a slide, the default of `Settings`.
    """
    settings = {"mean_size": 161.7, **settings}
    return (
        cohort(95, 70, seed=seed, part=0, **settings),
        cohort(31, 25, seed=seed, part=1, **settings),
    )


def panda_like(
    scale: Number = 1.0, seed: int = 0, part: int = 0, chunk: int = 256, **settings: Any
) -> Iterator[Bags]:
    """A cohort in the numbers of PANDA, streamed: 10,503 slides, 72 % positive, 1.1 M patches.

    `scale` multiplies the number of slides.
    """
    if not 0 < scale < np.inf:
        raise ValueError(f"scale must be positive, got {scale}")
    n_bags = max(2, round(10_503 * scale))
    settings = {"mean_size": 105.5, **settings}
    return stream(n_bags, round(0.72 * n_bags), seed=seed, part=part, chunk=chunk, **settings)


# ---------------------------------------------------------------------------------- checks
def _check_counts(n_bags: int, n_positive: int, seed: int, part: int, chunk: int) -> None:
    """Raise ValueError for a cohort that cannot be drawn."""
    if n_bags < 1:
        raise ValueError(f"n_bags must be at least 1, got {n_bags}")
    if not 0 <= n_positive <= n_bags:
        raise ValueError(
            f"n_positive must lie between 0 and n_bags = {n_bags}, got {n_positive}: "
            "lower it, or ask for more bags"
        )
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 slide, got {chunk}")
    if seed < 0 or part < 0:
        raise ValueError(f"seed and part must not be negative, got seed={seed}, part={part}")


_SHARES = ("off_lattice", "holes", "second_lesion", "mimic", "patient_share", "patient_risk")
_POSITIVE = ("size_shape", "type_length", "texture_length", "decay")
_NOT_NEGATIVE = (
    "ragged",
    "separation",
    "type_spread",
    "grain",
    "texture",
    "stain",
    "noise",
    "field_effect",
)


def _check_settings(s: Settings) -> None:
    """Raise ValueError for settings that no slide could have."""
    if s.n_latent < 2 or s.n_features < s.n_latent:
        raise ValueError(
            f"n_features must be at least n_latent = {s.n_latent}, which must be at least 2; "
            f"got n_features={s.n_features}: raise it, or lower n_latent"
        )
    if s.min_size < 1 or not s.min_size <= s.mean_size < np.inf:
        raise ValueError(
            "expected 1 <= min_size <= mean_size, both in patches; "
            f"got min_size={s.min_size}, mean_size={s.mean_size}"
        )
    if not 1 <= s.core_width < np.inf:
        raise ValueError(f"core_width must be at least 1 patch, got {s.core_width}")
    if s.step < 4:
        raise ValueError(f"step must be at least 4 pixels, got {s.step}")
    if not 0 < s.max_lesion <= 1:
        raise ValueError(f"max_lesion must lie in (0, 1], got {s.max_lesion}")
    for name in _SHARES:
        if not 0 <= getattr(s, name) <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {getattr(s, name)}")
    for name in _POSITIVE:
        if not 0 < getattr(s, name) < np.inf:
            raise ValueError(f"{name} must be positive, got {getattr(s, name)}")
    for name in _NOT_NEGATIVE:
        if not 0 <= getattr(s, name) < np.inf:
            raise ValueError(f"{name} must not be negative, got {getattr(s, name)}")
    for name in ("core_counts", "patient_sizes"):
        chances = np.asarray(getattr(s, name), dtype=float)
        if chances.size == 0 or not (chances >= 0).all() or abs(chances.sum() - 1) > 1e-8:
            raise ValueError(f"{name} must be probabilities that sum to 1, got {chances.tolist()}")
