"""The models that are put to the test: all of the package, and torchmil's where it is installed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from gpmil.data.bags import Bags
from gpmil.models import VGPMIL, VGPMILPR, VGPMILPRI, paper_settings
from gpmil.models.base import BagClassifier
from gpmil.models.concepts import AllConceptsMIL
from gpmil.models.screened import ScreenedMIL
from gpmil.paper import methods as of_the_paper
from gpmil.paper.methods import Method
from gpmil.proof import shifted_mean, torchmil_models

CPU = {"device": "cpu"}
LEARNED = "learned settings"


def _maker(cls: type, **settings: Any) -> Callable[[int], Any]:
    return lambda seed: cls(random_state=seed, **settings)


def without_positions(quick: bool = False) -> list[Method]:
    """For bags without positions, where VGPMIL-PR-I is VGPMIL-PR."""
    small = {"n_inducing": 40, "tuning_budget": 6} if quick else {}
    few = {"n_inducing": 40} if quick else {}
    paper = paper_settings("VGPMILPR") | few | CPU
    pair = VGPMILPR(**small, **CPU)
    return [
        Method("pr", "VGPMIL-PR", _maker(VGPMILPR, **small, **CPU), settings=LEARNED, effort=10.0),
        Method("pr-paper", "VGPMIL-PR", _maker(VGPMILPR, **paper), settings="the paper's"),
        _of_the_paper(few)[1],
        Method(
            "concepts",
            "AllConceptsMIL, 2 concepts",
            _maker(AllConceptsMIL, n_concepts=2, model=pair),
            settings=LEARNED,
            effort=80.0,
        ),
        *(m for m in networks(quick) if m.key != "smooth"),  # there are no neighbours
    ]


def on_chains(quick: bool = False) -> list[Method]:
    """For shifted means: chains of instances, of which one feature tells."""
    small = {"n_inducing": 40, "tuning_budget": 6} if quick else {}
    settings = small | CPU
    ard = Method(
        "ard",
        "VGPMIL-PR-I, a length per column",
        _maker(VGPMILPRI, lengthscale="ard", **settings),
        settings=LEARNED,
        effort=8.0,
    )
    smooth = Method(
        "screened-smooth",
        "Smooth-Att-MIL, columns screened",
        lambda seed: ScreenedMIL(_network("smooth", quick).make(seed)),
        effort=6.0,
    )
    return [
        Method("bayes", "Bayes", lambda seed: BayesOfShiftedMean(), effort=0.01),
        Method("pri", "VGPMIL-PR-I", _maker(VGPMILPRI, **settings), settings=LEARNED, effort=5.0),
        ard,
        *_screened(settings),
        smooth,
        Method("pr", "VGPMIL-PR", _maker(VGPMILPR, **settings), settings=LEARNED, effort=5.0),
        *_of_the_paper({"n_inducing": 40} if quick else {}),
        *networks(quick),
    ]


def _of_the_paper(few: dict[str, Any]) -> list[Method]:
    """VGPMIL-PR-I with lambda = .5 and VGPMIL, at the paper's settings."""
    kinds: list[tuple[str, str, type, float]] = [
        ("pri-paper", "VGPMIL-PR-I", VGPMILPRI, 1.0),
        ("vgpmil", "VGPMIL", VGPMIL, 6.0),
    ]
    return [
        Method(key, name, _maker(cls, **paper_settings(cls.__name__) | few | CPU),
               settings="the paper's", effort=effort)
        for key, name, cls, effort in kinds
    ]  # fmt: skip


def _screened(settings: dict[str, Any]) -> list[Method]:
    """The GP models on the columns that tell, without and with the means of neighbours."""
    kinds: list[tuple[str, str, type, bool]] = [
        ("screened", "VGPMIL-PR-I, columns screened", VGPMILPRI, False),
        ("screened-beside", "VGPMIL-PR-I, columns screened with neighbours", VGPMILPRI, True),
        # what neighbours say stands in the columns: coupling them as well says it twice
        ("uncoupled-beside", "VGPMIL-PR, columns screened with neighbours", VGPMILPR, True),
    ]

    def maker(cls: type, beside: bool) -> Callable[[int], Any]:
        return lambda seed: ScreenedMIL(cls(random_state=seed, **settings), neighbours=beside)

    return [
        Method(key, title, maker(cls, beside), settings=LEARNED, effort=5.0)
        for key, title, cls, beside in kinds
    ]


def networks(quick: bool) -> Sequence[Method]:
    """Ours, and torchmil's."""
    few = of_the_paper.networks(CPU, quick, search=False)
    own = [replace(m, runs_once=False, effort=2 * m.effort) for m in few]  # small bags cost more
    if not torchmil_models.installed():
        return own
    small = {"max_epochs": 15} if quick else {}
    others = [
        Method(
            f"torchmil-{name.lower()}",
            f"torchmil {name}",
            _maker(torchmil_models.TorchmilModel, network=name, **small),
            effort=10.0,
        )
        for name in torchmil_models.NETWORKS
    ]
    return [*own, *others]


def _network(key: str, quick: bool) -> Method:
    return next(m for m in of_the_paper.networks(CPU, quick, search=False) if m.key == key)


class BayesOfShiftedMean(BagClassifier):
    """The classifier that knows how shifted means are drawn; there is nothing to fit."""

    def fit(self, bags, y=None):
        """Nothing is learned."""
        return self

    def log_proba_negative(self, bags: Bags) -> tuple[Float[np.ndarray, " B"], Any]:
        """log P(y_b = 0), exactly."""
        return -np.logaddexp(0, shifted_mean.bayes_log_odds(bags)), np.zeros(len(bags))
