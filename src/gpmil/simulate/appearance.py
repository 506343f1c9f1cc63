"""How tissue looks: types that the slides of a cohort share, stain, texture, and the features."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from numpy.random import Generator

from gpmil.simulate.settings import POPULATION, Settings, generator
from gpmil.simulate.tissue import Cells, neighbours, smooth_fields


@dataclass(frozen=True)
class Population:
    """What all slides of a cohort share: the appearance of the tissue types (q latent dims)."""

    settings: Settings
    benign: Float[np.ndarray, "benign_types q"]
    malignant: Float[np.ndarray, "malignant_types q"]
    cancer: Float[np.ndarray, " q"]  # separation x the common cancer direction
    embedding: Float[np.ndarray, "q d"]  # orthogonal rows of decreasing length
    base: Float[np.ndarray, " d"]


def population(seed: int = 0, settings: Settings | None = None) -> Population:
    """What the slides of the cohort with this seed have in common.

    Four benign tissue types, one of which resembles cancer, and three malignant ones.
    """
    settings = Settings() if settings is None else settings
    rng = generator(seed, POPULATION)
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
    rng: Generator, cells: Cells, length: float, offsets: np.ndarray
) -> Int[np.ndarray, " n"]:
    """A tissue type for every cell: the highest of smooth fields with the slide's own levels."""
    level = offsets + rng.standard_normal(len(offsets))
    return np.argmax(smooth_fields(rng, cells, length, len(offsets)) + level, axis=1)


def draw_features(
    rng: Generator,
    cells: Cells,
    lesion: Bool[np.ndarray, " n"],
    shift: Float[np.ndarray, " q"],
    population: Population,
    more: Float[np.ndarray, "n q"] | None = None,
) -> Float32[np.ndarray, "n d"]:
    """relu(base + (type mean + slide shift + texture + grain [+ field effect]) E + white noise).

    `more` is what else moves a patch, such as its grade.
    """
    p, s = population, population.settings
    # The mimic is rarer than the other benign types.
    benign = p.benign[_types(rng, cells, s.type_length, np.array([0.0, 0.0, 0.0, -1.0]))]
    malignant = p.malignant[_types(rng, cells, s.type_length, np.zeros(3))]
    texture = s.texture * smooth_fields(rng, cells, s.texture_length, s.n_latent)
    grain = s.grain * rng.standard_normal(texture.shape)
    noise = rng.standard_normal((len(cells), s.n_features), dtype=np.float32)
    latent = np.where(lesion[:, None], malignant, benign) + shift + texture + grain
    if more is not None:
        latent += more
    if s.field_effect:
        latent[_touching(cells, lesion)] += s.field_effect * p.cancer
    z = (latent @ p.embedding + p.base).astype(np.float32) + np.float32(s.noise) * noise
    return np.maximum(z, np.float32(0))


def _touching(cells: Cells, lesion: Bool[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Benign cells that share a side with a malignant one."""
    edges = neighbours(cells)
    touching = np.zeros(len(cells), dtype=bool)
    for a, b in (edges.T, edges[:, ::-1].T):
        touching[a[lesion[b]]] = True
    return touching & ~lesion
