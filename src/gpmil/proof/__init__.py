"""Tests with a known answer, for every model: what `gpmil proof` puts on one page.

algorithmic     bags on which a shortcut misleads (Raff and Holt)
shifted_mean    bags whose best classifier is known (Harvey et al.)
from_the_model  cohorts drawn from the model: is the truth where the posterior says it is?
promises        error rates that are promised, under the assumptions and without them
real_sets       every model on real data
page            all of it on one page
"""
