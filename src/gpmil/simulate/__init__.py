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

from gpmil.simulate.appearance import Population, population
from gpmil.simulate.cohorts import (
    DISTINCT,
    Slide,
    cohort,
    demonstration,
    panda_like,
    sicapv2_like,
    slide,
    stream,
)
from gpmil.simulate.grades import GradedCohort, graded_cohort
from gpmil.simulate.settings import Settings

__all__ = [
    "DISTINCT",
    "GradedCohort",
    "Population",
    "Settings",
    "Slide",
    "cohort",
    "demonstration",
    "graded_cohort",
    "panda_like",
    "population",
    "sicapv2_like",
    "slide",
    "stream",
]
