"""The models that the paper compares, with the paper's settings, and ours beside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sklearn.model_selection import GridSearchCV, StratifiedKFold

from gpmil.models import (
    VGPMIL,
    VGPMILPR,
    VGPMILPRI,
    AttentionMIL,
    MaxPoolMIL,
    MeanPoolMIL,
    PseudoLabelMIL,
    paper_settings,
)

COUPLINGS = (0.1, 0.5, 1.0, 5.0, 10.0)  # the paper's values of lambda
DEFAULT = 0.5  # the one it uses "by default in the sequel"
TUNED = ("tuned", "effect", "context")  # keys of the rows whose settings are learned
GRID = {  # the search that networks get
    "learning_rate": [1e-4, 3e-4, 1e-3],
    "weight_decay": [1e-4, 1e-2],
    "max_epochs": [30, 100],
}


@dataclass(frozen=True)
class Method:
    """One row of the tables: `make(seed)` builds the model, not yet fitted."""

    key: str  # "pri-0.5": names files and looks up the paper's numbers
    name: str  # "VGPMIL-PR-I"
    make: Callable[[int], Any]
    coupling: float | None = None  # lambda, where it is given
    settings: str = ""  # what differs from the paper's: "learned settings"
    runs_once: bool = False
    effort: float = 1.0  # rough cost of a run, that of VGPMIL-PR being one: for the time left

    @property
    def label(self) -> str:
        """Name, lambda and settings in one string."""
        strength = "" if self.coupling is None else f", λ = {self.coupling:g}"
        return f"{self.name}{strength}" + (f" ({self.settings})" if self.settings else "")


def key_of(coupling: float) -> str:
    """The key of VGPMIL-PR-I at one of the paper's values of lambda."""
    return f"pri-{coupling:g}"


def compared(common: Mapping[str, Any], quick: bool = False, search: bool = False) -> list[Method]:
    """Every method of the paper and ours, in the order of its tables.

    `common` goes to all models (n_components, device). `quick` makes everything small; `search`
    lets networks look for learning rate, weight decay and epochs by cross-validation.
    """
    return [*gaussian(common, quick), *learned(common, quick), *networks(common, quick, search)]


def gaussian(common: Mapping[str, Any], quick: bool) -> list[Method]:
    """VGPMIL, VGPMIL-PR and VGPMIL-PR-I at the paper's settings."""
    small = {"n_inducing": 40, "max_iter": 50} if quick else {}

    def make(cls: type, coupling: float | None = None) -> Callable[[int], Any]:
        settings = paper_settings(cls.__name__) | small | dict(common)
        if coupling is not None:
            settings["coupling"] = coupling
        return lambda seed: cls(random_state=seed, **settings)

    return [
        Method("vgpmil", "VGPMIL", make(VGPMIL), effort=6.0),
        Method("pr", "VGPMIL-PR", make(VGPMILPR)),
        *(
            Method(key_of(c), "VGPMIL-PR-I", make(VGPMILPRI, c), coupling=c, effort=1.2)
            for c in COUPLINGS
        ),
    ]


def learned(common: Mapping[str, Any], quick: bool) -> list[Method]:
    """VGPMIL-PR-I with settings learned from bags left out: the paper's, and more of them.

    The slide effect is what all patches of a slide share beyond their features, the slide context
    what the slide's mean feature adds to each of them; the paper has neither.
    """
    small = {"n_inducing": 40, "tuning_budget": 6} if quick else {}

    def make(**slides: float | str) -> Callable[[int], Any]:
        settings = slides | small | dict(common)
        return lambda seed: VGPMILPRI(random_state=seed, **settings)

    with_effect = {"slide_effect": "auto"}
    rows = [
        ("VGPMIL-PR-I", make(slide_effect=0.0), 4.0),
        ("VGPMIL-PR-I, slide effect", make(**with_effect), 6.0),
        ("VGPMIL-PR-I, slide effect, context", make(**with_effect, slide_context="auto"), 10.0),
    ]
    return [
        Method(key, name, build, settings="learned settings", effort=effort)
        for key, (name, build, effort) in zip(TUNED, rows, strict=True)
    ]


def networks(common: Mapping[str, Any], quick: bool, search: bool) -> list[Method]:
    """Attention, pooling and pseudo labels."""
    small = {"max_epochs": 15} if quick else {}

    def make(cls: type, **settings: Any) -> Callable[[int], Any]:
        def build(seed: int) -> Any:
            model = cls(random_state=seed, **settings, **small, **common)
            return searched(model, seed) if search else model

        return build

    words = "searched" if search else ""
    effort = 3.0 * (37 if search else 1)  # twelve settings, three folds, and the last fit
    attention = [
        ("attention", "Att-MIL", make(AttentionMIL)),
        ("gated", "Gated-Att-MIL", make(AttentionMIL, gated=True)),
        ("smooth", "Smooth-Att-MIL", make(AttentionMIL, smooth="learn", smoothing="approximate")),
        ("mean", "Mean-Agg", make(MeanPoolMIL)),
        ("max", "Max-Agg", make(MaxPoolMIL)),
    ]
    own = {k: v for k, v in common.items() if k != "device"}

    def pseudo(seed: int) -> PseudoLabelMIL:
        return PseudoLabelMIL(random_state=seed, **({"n_rounds": 2} if quick else {}), **own)

    return [
        *(Method(k, name, build, settings=words, effort=effort) for k, name, build in attention),
        Method("pseudo", "PS-MIL", pseudo, runs_once=True, effort=8.0),
    ]


def searched(model: Any, seed: int) -> GridSearchCV:
    """The model with the learning rate, weight decay and epochs that three folds prefer."""
    folds = StratifiedKFold(3, shuffle=True, random_state=seed)
    return GridSearchCV(model, GRID, scoring="neg_log_loss", cv=folds, error_score="raise")
