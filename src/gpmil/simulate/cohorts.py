"""Slides and cohorts drawn from a population, each slide from a random stream of its own."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int

from gpmil.data.bags import Bags
from gpmil.simulate.appearance import Population, draw_features, population
from gpmil.simulate.settings import PATIENT, ROSTER, SLIDE, Number, Settings, generator
from gpmil.simulate.tissue import grow_lesions, lay_tissue

# Lesions that are not hard: chosen by the yardstick of cli/demo_models.py alone.
DISTINCT: dict[str, Any] = {"min_lesion": 5, "separation": 5.0}


class Slide(NamedTuple):
    """One simulated slide of n patches: features (n, D), coords (n, 2) in pixels, truth."""

    features: Float32[np.ndarray, "n d"]
    coords: Int[np.ndarray, "n 2"]  # x, y of the upper left corner at level 0
    instance_labels: Int[np.ndarray, " n"]  # 1 malignant, 0 benign
    label: int


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
    cells, corners = lay_tissue(tissue, s)
    lesion = grow_lesions(lesions, cells, s) if label else np.zeros(len(cells), dtype=bool)
    own, drawn = stain.standard_normal((2, s.n_latent))
    patient = drawn if patient_shift is None else patient_shift
    shift = s.stain * (np.sqrt(1 - s.patient_share) * own + np.sqrt(s.patient_share) * patient)
    x = draw_features(features, cells, lesion, shift, population)
    return Slide(x, corners, lesion.astype(np.int64), label)


class Roster(NamedTuple):
    """Who belongs to the cohort: the label and the patient of every slide."""

    labels: Int[np.ndarray, " bags"]
    patients: Int[np.ndarray, " bags"]


def draw_roster(seed: int, part: int, n_bags: int, n_positive: int, settings: Settings) -> Roster:
    """Patients in order, with one to three slides each; the slides at highest risk are positive.

    Every draw is sequential, so a larger cohort begins with the patients of a smaller one.
    """
    sizes, patient, own = generator(seed, ROSTER, part).spawn(3)
    slides = 1 + sizes.choice(len(settings.patient_sizes), size=n_bags, p=settings.patient_sizes)
    patients = np.repeat(np.arange(n_bags), slides)[:n_bags]
    share = settings.patient_risk
    risk = np.sqrt(share) * patient.standard_normal(n_bags)[patients]
    risk += np.sqrt(1 - share) * own.standard_normal(n_bags)
    labels = np.zeros(n_bags, dtype=np.int64)
    labels[np.argsort(-risk)[:n_positive]] = 1
    return Roster(labels, patients)


def _draw(indices: range, roster: Roster, seed: int, part: int, population: Population) -> Bags:
    """The slides with these indices, as Bags."""
    q = population.settings.n_latent
    slides = []
    for i in indices:
        of_patient = generator(seed, PATIENT, part, int(roster.patients[i])).standard_normal(q)
        rng = generator(seed, SLIDE, part, i)
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
        features per patch.
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
    roster = draw_roster(seed, part, n_bags, n_positive, shared.settings)
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
    thousand patches. The published counts, 162 patches per slide, list malignant patches twice;
    distinct patches are 121 per slide, the default of `Settings`.
    """
    settings = {"mean_size": 161.7, **settings}
    return (
        cohort(95, 70, seed=seed, part=0, **settings),
        cohort(31, 25, seed=seed, part=1, **settings),
    )


def demonstration(seed: int, n_train: int, n_test: int, hard: bool = False) -> tuple[Bags, Bags]:
    """The slides of `gpmil demo`: some to train on, and held-out ones of other patients.

    The lesions are DISTINCT, unless they are to be `hard`: as they are by default.
    """
    lesions = {} if hard else DISTINCT
    train = cohort(n_train, seed=seed, part=0, **lesions)
    return train, cohort(n_test, seed=seed, part=1, **lesions)


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
