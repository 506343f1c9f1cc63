"""Cohorts with grades: a lesion has a grade, sometimes two, and a slide that of its worst patch.

Slides as in cohorts.py. A slide of grade 1 or more has lesions; with chance `second_grade` only a
part of them has the slide's grade, and the rest a lower one. Grades move a patch along the common
cancer direction, by equal steps from a little less than the separation of `Settings` on, and each
has a direction of its own, so that a grade is more than "further along". The steps were set with
one yardstick only: a logistic regression trained on the true patch grades of 120 slides tells
neighbouring grades of malignant patches of 120 others apart with an AUC of .86 (.82 to .90 over
three seeds, grades 1 to 3). All of it was fixed before any multiple instance model was run on these
cohorts, and is not to be adjusted so that a finding comes true.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gpmil.data.bags import Bags
from gpmil.simulate.appearance import Population, draw_features, population
from gpmil.simulate.cohorts import Slide, draw_roster
from gpmil.simulate.settings import GRADES, PATIENT, SLIDE, Number, Settings, generator
from gpmil.simulate.tissue import grow_lesions, lay_tissue

FIRST, STEP = 0.7, 0.6  # of the separation: where grade 1 lies, and each further one
OWN = 0.5  # of the spread of tissue types: the direction that a grade has of its own


class GradedCohort(NamedTuple):
    """Bags, labelled 1 above grade 0; the grade of every bag, and of every instance."""

    bags: Bags
    grades: Int[np.ndarray, " B"]
    instance_grades: Int[np.ndarray, " N"]


def graded_cohort(
    n_bags: int = 60,
    n_grades: int = 4,
    n_features: int = 128,
    seed: int = 0,
    part: int = 0,
    second_grade: Number = 0.4,
    **settings: Any,
) -> GradedCohort:
    """A cohort with as many slides of every grade, 0 to `n_grades` - 1, but for rounding.

    `part` is another part of the same population, with other patients; `settings` are fields of
    `Settings`, where they differ from the defaults.

    >>> bags, grades, patches = graded_cohort(9, n_grades=3, n_features=16, seed=1)
    >>> np.bincount(grades), bool((np.maximum.reduceat(patches, bags.offsets[:-1]) == grades).all())
    (array([3, 3, 3]), True)
    """
    if not 2 <= n_grades <= 8 or n_bags < n_grades:
        raise ValueError(
            f"expected 2 to 8 grades and as many bags at least, got n_grades={n_grades}, "
            f"n_bags={n_bags}"
        )
    if not 0 <= second_grade <= 1:
        raise ValueError(f"second_grade must lie in [0, 1], got {second_grade}")
    shared = population(seed, Settings(n_features=n_features, **settings))
    # the slides at highest risk have the highest grade: as many rosters, one inside the other
    above = [round(n_bags * (n_grades - k) / n_grades) for k in range(1, n_grades)]
    rosters = [draw_roster(seed, part, n_bags, n, shared.settings) for n in above]
    grades, patients = np.sum([r.labels for r in rosters], axis=0), rosters[0].patients
    places, slides = _places(seed, n_grades, shared), []
    for i, grade in enumerate(grades.tolist()):
        q = shared.settings.n_latent
        patient = generator(seed, PATIENT, part, int(patients[i])).standard_normal(q)
        rng = generator(seed, SLIDE, part, i)
        slides.append(_slide(rng, grade, shared, patient, places, float(second_grade)))
    return _joined(slides, grades, patients, part, shared.settings.step)


def _joined(
    slides: list[Slide],
    grades: Int[np.ndarray, " B"],
    patients: Int[np.ndarray, " B"],
    part: int,
    step: int,
) -> GradedCohort:
    bags = Bags.from_arrays(
        [s.features for s in slides],
        labels=[s.label for s in slides],
        coords=[s.coords for s in slides],
        step=step,
        graph="grid4",
        names=[f"slide-{part}-{i:05d}" for i in range(len(slides))],
        groups=[f"patient-{part}-{patient:05d}" for patient in patients],
        instance_labels=[np.minimum(s.instance_labels, 1) for s in slides],
    )
    return GradedCohort(bags, grades, np.concatenate([s.instance_labels for s in slides]))


def _places(seed: int, n_grades: int, population: Population) -> Float[np.ndarray, "K q"]:
    """Where a grade lies, from where malignant tissue lies without one; benign tissue stays."""
    s, cancer = population.settings, population.cancer
    own = generator(seed, GRADES).standard_normal((n_grades, s.n_latent))
    length = max(float(cancer @ cancer), 1e-12)
    own -= np.outer(own @ cancer, cancer) / length
    own *= OWN * s.type_spread / np.linalg.norm(own, axis=1, keepdims=True)
    along = FIRST + STEP * (np.arange(n_grades) - 1) - 1
    places = along[:, None] * cancer + own
    places[0] = 0
    return places


def _slide(
    rng: np.random.Generator,
    grade: int,
    population: Population,
    patient: Float[np.ndarray, " q"],
    places: Float[np.ndarray, "K q"],
    second_grade: float,
) -> Slide:
    """One slide, as in cohorts.py; its instance labels are grades."""
    s = population.settings
    tissue, lesions, stain, features = rng.spawn(4)
    cells, corners = lay_tissue(tissue, s)
    patches = np.zeros(len(cells), dtype=np.int64)
    if grade:
        lesion = np.flatnonzero(grow_lesions(lesions, cells, s))
        patches[lesion] = grade
        if grade > 1 and lesions.random() < second_grade:
            worst = grow_lesions(lesions, cells[lesion], s)
            patches[lesion[~worst]] = lesions.integers(1, grade)
    own = stain.standard_normal(s.n_latent)
    shift = s.stain * (np.sqrt(1 - s.patient_share) * own + np.sqrt(s.patient_share) * patient)
    x = draw_features(features, cells, patches > 0, shift, population, places[patches])
    return Slide(x, corners, patches, int(grade > 0))
