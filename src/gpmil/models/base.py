"""The estimator contract: what every model of bags offers, to users and to scikit-learn."""

import copy
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from logging import getLogger
from numbers import Real
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted

from gpmil import __version__
from gpmil.data import extraction
from gpmil.data.bags import Bags
from gpmil.distributed import Facts
from gpmil.models.progress import progress_shown
from gpmil.process import features

logger = getLogger("gpmil")


@dataclass(frozen=True)
class InstancePredictions:
    """What a model says of every instance; arrays of length N in the order of the bags' rows."""

    probability: Float[np.ndarray, " N"]  # P(h_i = 1)
    mean: Float[np.ndarray, " N"]  # of m*_i
    std: Float[np.ndarray, " N"]  # of m*_i
    bags: Bags
    p_value: Float[np.ndarray, " N"] | None = None
    flagged: Bool[np.ndarray, " N"] | None = None
    doubt: Float[np.ndarray, " N"] | None = None  # of f_i: 0 known, 1 as before any slide
    unlike: Float[np.ndarray, " N"] | None = None  # see `gpmil.decide.unlike`
    novelty: Float[np.ndarray, " N"] | None = None  # above 1: beyond 99 % of the training patches

    def __len__(self) -> int:
        return len(self.probability)

    def split(self) -> list["InstancePredictions"]:
        """One `InstancePredictions` per bag."""
        columns = {k: getattr(self, k) for k in ("probability", "mean", "std", *OPTIONAL)}
        cuts = self.bags.offsets[1:-1]
        pieces = {k: np.split(v, cuts) for k, v in columns.items() if v is not None}
        return [
            InstancePredictions(bags=bag, **{k: v[b] for k, v in pieces.items()})
            for b, bag in enumerate(self.bags)
        ]

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per instance: bag, position where known, and the predictions."""
        columns = instance_columns(self.bags)
        columns |= {"probability": self.probability, "mean": self.mean, "std": self.std}
        columns |= {k: getattr(self, k) for k in OPTIONAL if getattr(self, k) is not None}
        return pd.DataFrame(columns)


@dataclass(frozen=True)
class Predictions:
    """All that a model says of bags and of their instances."""

    log_proba_negative: Float[np.ndarray, " B"]  # the model's own, before any calibration
    error: Float[np.ndarray, " B"]  # of log_proba_negative
    log_odds: Float[np.ndarray, " B"]  # as decision_function
    proba: Float[np.ndarray, "B 2"]  # as predict_proba; of grades: the lowest, and above it
    instances: InstancePredictions | None  # None: the model has no probability for an instance
    interval: Float[np.ndarray, "B 2"]  # of proba[:, 1]; nan where not asked for, or not known
    novelty: Float[np.ndarray, " B"] | None = None  # above 1: beyond the training slides; or nan
    class_proba: Float[np.ndarray, "B K"] | None = None  # of models of grades or types: of each


OPTIONAL = ("p_value", "flagged", "doubt", "unlike", "novelty")


def instance_columns(bags: Bags) -> dict[str, Any]:
    """The columns that every table of instances begins with: bag, and x, y, z where known."""
    axes = [] if bags.coords is None else zip("xyz", bags.coords.T)
    return {"bag": bags.names[bags.bag_index], **dict(axes)}


Model = TypeVar("Model", bound="BagClassifier")


class BagClassifier(ClassifierMixin, BaseEstimator):
    """A scikit-learn classifier whose samples are the bags of a `Bags`.

    `bags` is checked where it comes in, so that a list of arrays gets advice and not a traceback.
    """

    classes_: np.ndarray
    n_features_in_: int
    feature_mean_: np.ndarray
    feature_scale_: np.ndarray
    feature_components_: np.ndarray | None
    cohort_: dict[str, Any]
    n_components: Any
    standardize: Any
    verbose: Any
    allow_mismatch = False
    """Whether bags whose features were made otherwise are predicted, with a warning; set it on a
    fitted model. It is not saved."""

    @property
    def facts_(self) -> extraction.Facts:
        """How the features of the fit were made, as in `Bags.facts`; empty where nobody said."""
        return extraction.known(self.cohort_)

    def fit(self: Model, bags, y=None) -> Model:
        """Fit to labelled bags; y (0/1, one per bag) wins over `bags.labels`."""
        fresh = copy.copy(self)  # a fit that fails leaves this model as it was
        with progress_shown(bool(self.verbose)):
            fresh._fit(check_bags(bags, finite=not self._notices_missing_values()), y)
        self.__dict__.update(fresh.__dict__)
        return self

    def _fit(self, bags: Bags, y) -> None:
        raise NotImplementedError

    def _notices_missing_values(self) -> bool:
        """Whether the fit finds NaN and infinity by itself, in what it reads first."""
        return False

    def _remember_cohort(self, bags: Bags | Facts, y) -> Int[np.ndarray, " B"]:
        """Keep what a fitted model knows of its cohort; the labels 0/1 of the bags."""
        labels, self.classes_ = training_labels(bags, y)
        self.n_features_in_ = bags.n_features
        self.cohort_ = cohort_card(bags, labels)
        return labels

    def _fit_feature_map(self, rows: features.Rows) -> None:
        wanted = None if self.n_components is None else int(self.n_components)
        self._keep_feature_map(features.fitted(rows, wanted, bool(self.standardize)))

    def _keep_feature_map(self, found: features.FeatureMap) -> None:
        self.feature_mean_, self.feature_scale_ = found.mean, found.scale
        self.feature_components_ = found.components

    def _feature_map(self) -> features.FeatureMap:
        return features.FeatureMap(
            self.feature_mean_, self.feature_scale_, self.feature_components_
        )

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.classifier_tags.multi_class = False
        return tags

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(all instances negative) of each bag, and the error of that number."""
        raise NotImplementedError

    def decision_function(self, bags) -> Float[np.ndarray, " B"]:
        """Log odds of a positive bag: log(1 - P) - log P, P = P(all instances negative)."""
        log_p, _ = self.log_proba_negative(bags)
        return log_odds(self._calibrate(log_p))

    def predict_proba(self, bags) -> Float[np.ndarray, "B 2"]:
        """P(y_b = 0) and P(y_b = 1); never exactly 0 or 1 by rounding."""
        log_p, _ = self.log_proba_negative(bags)
        return both_classes(self._calibrate(log_p))

    def predict_instances(self, bags) -> InstancePredictions:
        """P(h_i = 1) of every instance; refused, with the reason, where a model has none."""
        raise ValueError(
            f"{type(self).__name__} is trained on whole bags and has no probability for an "
            "instance. Use gpmil.VGPMILPRI for probabilities and marks of instances."
        )

    def predict_all(
        self,
        bags,
        *,
        rate: float = 0.1,
        level: float | None = None,
        interval_size: int | None = None,
    ) -> Predictions:
        """All that the model says of bags and instances, cheaper than one method after another.

        A model that marks instances marks them at a false discovery rate of `rate`. One that knows
        intervals gives them at `level`, for bags of at most `interval_size` instances.
        """
        log_p, error, instances = self._bags_and_instances(bags)
        nowhere = np.full((len(log_p), 2), np.nan)
        return self._predictions(log_p, error, instances, nowhere)

    def _predictions(
        self,
        log_p: Float[np.ndarray, " B"],
        error: Float[np.ndarray, " B"],
        instances: InstancePredictions | None,
        interval: Float[np.ndarray, "B 2"],
    ) -> Predictions:
        known = self._calibrate(log_p)
        return Predictions(log_p, error, log_odds(known), both_classes(known), instances, interval)

    def _bags_and_instances(
        self, bags
    ) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"], InstancePredictions | None]:
        """`log_proba_negative` and `predict_instances`; a model may have them from one pass."""
        log_p, error = self.log_proba_negative(bags)
        try:
            return log_p, error, self.predict_instances(bags)
        except ValueError as reason:  # the bags are fine, as the line above shows
            logger.info("instances are not predicted: %s", reason)
            return log_p, error, None

    def _calibrate(self, log_p: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """log P(y = 0) from the model's own; the same where nothing was calibrated."""
        return log_p

    def predict(self, bags) -> np.ndarray:
        """The likelier class of each bag, as a value of `classes_`."""
        log_odds = self.decision_function(bags)
        return self.classes_[(log_odds > 0).astype(int)]

    def score(self, bags, y=None) -> float:
        """Accuracy over bags; y defaults to the bags' own labels."""
        known = _known_labels(check_bags(bags)) if y is None else np.asarray(y)
        return float(accuracy_score(known, self.predict(bags)))

    def _check_predictable(self, bags) -> Bags:
        check_is_fitted(self)
        bags = check_bags(bags)
        self.check_features(bags)
        self.check_agreement(bags)
        return bags

    def check_features(self, bags: Bags) -> None:
        """A ValueError where there are more or fewer features than in the fit."""
        if bags.n_features != self.n_features_in_:
            raise ValueError(
                f"the model was fitted on {self.n_features_in_} features per instance, these bags "
                f"have {bags.n_features}. Features of another encoder, or other columns?"
            )

    def check_agreement(self, bags: Bags, allow: str = "model.allow_mismatch = True") -> str:
        """A ValueError where features were made otherwise than those of the fit.

        Where that is allowed it is logged and returned; what could not be compared is logged, too.
        `allow` tells how to allow it.
        """
        wrong = self._mismatch(bags)
        if wrong and not self.allow_mismatch:
            raise ValueError(f"{wrong} To go on all the same: {allow}.")
        said = warning(wrong) if wrong else ""
        self._say_once([*filter(None, [said]), *self._notes(bags)])
        return said

    def _mismatch(self, bags: Bags) -> str:
        """What these bags say otherwise than those of the fit, in sentences; "" if nothing."""
        trained = self.cohort_.get("classes")
        found = (
            extraction.mismatch(self.facts_, dict(bags.facts)),
            extraction.class_mismatch(trained, bags.class_names),
        )
        return " ".join(sentence for sentence in found if sentence)

    def _notes(self, bags: Bags) -> list[str]:
        """What could not be compared."""
        return [
            *extraction.notes(self.facts_, dict(bags.facts)),
            *extraction.class_notes(self.cohort_.get("classes"), bags.class_names),
        ]

    def _say_once(self, lines: list[str]) -> None:
        """Predictions come in batches: a line is said for the first of them."""
        said = _SAID.setdefault(self, set())  # beside the model: a prediction leaves it as it is
        for line in lines:
            if line not in said:
                logger.warning("%s", line)
        said.update(lines)


_SAID: WeakKeyDictionary[BagClassifier, set[str]] = WeakKeyDictionary()


def warning(wrong: str) -> str:
    """What is said of a mismatch that is allowed."""
    return f"MISMATCH: {wrong} Predictions may be wrong."


def check_bags(bags: Any, finite: bool = True) -> Bags:
    """Insist on a `Bags`, and on features that are finite."""
    if not isinstance(bags, Bags):
        raise ValueError(
            f"expected gpmil.Bags, got {type(bags).__name__}. Build one with "
            "gpmil.Bags.from_arrays(list of (n, D) arrays, labels=...) or gpmil.Bags.from_frame."
        )
    if finite:
        bags.check_finite()  # a memory-mapped file was not read when the bags were built
    return bags


def training_labels(bags: Bags | Facts, y=None) -> tuple[Int[np.ndarray, " B"], np.ndarray]:
    """Labels 0/1 of every bag and the classes they stand for; y wins over the bags' own labels."""
    if not len(bags):
        raise ValueError("no bags to fit: the cohort, or this part of it, is empty.")
    values = bags.labels if y is None else _numbers(y)
    if values.ndim != 1 or len(values) != len(bags):
        raise ValueError(
            f"expected one label per bag, {len(bags)} in all; got an array of shape {values.shape}."
        )
    if values.dtype.kind not in "biuf":
        found = sorted({str(v) for v in values})
        raise ValueError(
            f"labels must be 0 or 1 in fit, found {found[:10]}. Name the positive class when "
            "building the bags: gpmil.Bags.from_arrays(..., labels=..., positive='cancer')."
        )
    if y is not None and set(np.unique(values)) == {-1, 1}:
        raise ValueError("labels must be 0 or 1, found -1 and 1; -1 means unknown. Pass (y > 0).")
    _refuse_unlabelled(bags, values)
    classes = np.unique(values)
    if not np.isin(classes, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1, found {classes[:10].tolist()}.")
    if len(classes) < 2:
        raise ValueError(
            f"all {len(bags)} bags have label {classes[0]}: a classifier needs bags of both "
            "classes. Check the label column, or the split."
        )
    return (values == classes[1]).astype(np.int64), classes


def _numbers(y) -> np.ndarray:
    """y as an array; a column of Python numbers (and None) is one of numbers."""
    values = np.asarray(y)
    if values.dtype != object or not all(v is None or isinstance(v, Real) for v in values.flat):
        return values
    known = np.array([np.nan if v is None else v for v in values.flat], dtype=float)
    whole = np.isfinite(known).all()
    return (known.astype(np.int64) if whole else known).reshape(values.shape)


def _refuse_unlabelled(bags: Bags | Facts, values: np.ndarray) -> None:
    unknown = np.flatnonzero((values == -1) | np.isnan(values.astype(float)))
    if len(unknown):
        names = ", ".join(str(bags.names[b]) for b in unknown[:3])
        more = ", ..." if len(unknown) > 3 else ""
        raise ValueError(
            f"{len(unknown)} of {len(bags)} bags have no label ({names}{more}): fit needs one "
            "for every bag. Leave them out with bags[bags.labels >= 0]; they can be predicted."
        )


def _known_labels(bags: Bags) -> np.ndarray:
    _refuse_unlabelled(bags, bags.labels)
    return bags.labels


def cohort_card(bags: Bags | Facts, labels: np.ndarray) -> dict[str, Any]:
    """What a model remembers of the cohort it was fitted on."""
    facts = Facts.of(bags) if isinstance(bags, Bags) else bags
    card = {
        "bags": len(facts),
        "positive": int(labels.sum()),
        "instances": facts.n_instances,
        "features": int(facts.n_features),
        "graph": facts.graph,
        "edges": int(facts.n_edges),
    }
    classes = {"classes": list(facts.class_names)} if facts.class_names else {}
    return card | classes | facts.extraction


def package_versions() -> dict[str, str]:
    """The versions that made a model."""
    names = ("torch", "gpytorch", "numpy", "scipy", "scikit-learn")
    own = {"python": platform.python_version(), "gpmil": __version__}
    return own | {name: version(name) for name in names}


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for; None takes a GPU where there is one, and says so."""
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        logger.info("device: %s (device='cpu' to stay off it)", torch.cuda.get_device_name())
        return torch.device("cuda")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu', 'cuda' or None, got {device!r}.")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={device!r} was asked for, but torch sees no GPU here. Use device='cpu', or "
            "install a CUDA build of torch."
        )
    return found


def both_classes(log_p: Float[np.ndarray, " B"]) -> Float[np.ndarray, "B 2"]:
    """P(y = 0) and P(y = 1) from log P(y = 0)."""
    p = np.stack([np.exp(log_p), -np.expm1(log_p)], axis=1)
    return np.clip(p, np.finfo(float).tiny, np.nextafter(1.0, 0.0))


def pooled(log_p: Sequence[Float[np.ndarray, "*n"]]) -> Float[np.ndarray, "*n"]:
    """log of the average of P(all negative), to the last digit where P is near 0 or 1."""
    if len(log_p) == 1:
        return log_p[0]
    positive = np.mean([-np.expm1(one) for one in log_p], axis=0)
    low = np.logaddexp.reduce(list(log_p), axis=0) - np.log(len(log_p))
    return np.where(positive < 0.5, np.log1p(-positive), low)


def log_odds(log_p: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """log(1 - P) - log P from log P, accurate at both ends.

    P = 1 to the last digit counts as the smallest double below it.
    """
    log_p = np.minimum(log_p, -np.finfo(float).tiny)
    with np.errstate(divide="ignore"):
        log_not = np.where(log_p > -np.log(2), np.log(-np.expm1(log_p)), np.log1p(-np.exp(log_p)))
    return log_not - log_p
