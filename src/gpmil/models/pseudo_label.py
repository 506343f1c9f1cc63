"""PS-MIL: an instance classifier trained in rounds on pseudo labels (Schmidt et al.).

The family of methods that the paper compares itself with: where the Gaussian-process models
integrate over the labels of the instances, these guess them, train, and guess again.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import expit, log_expit
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.utils.validation import check_is_fitted, has_fit_parameter

from gpmil.data.bags import Bags
from gpmil.data.graphs import bag_index
from gpmil.files import persistence
from gpmil.models import saved_checks
from gpmil.models.base import (
    BagClassifier,
    InstancePredictions,
    cohort_card,
    package_versions,
    training_labels,
)
from gpmil.models.checks import count, generator, is_number, one_of, plain, require_numbers

logger = logging.getLogger("gpmil")

LEFT_OUT = -1
"""Pseudo label of an instance that is neither among the highest nor the lowest of its bag."""

ROWS = 8192  # instances scored at a time
BATCH = (16, 256)  # fewest and most instances in a step of the network
STEPS = 50  # in an epoch, where there are instances enough
STORED = {c.__name__: c for c in (LogisticRegression, SGDClassifier, MLPClassifier)}
"""Classifiers that are a few matrices, and are saved as such."""
ARRAYS = ("classes_", "feature_mean_", "feature_scale_", "feature_components_")
NUMBERS = ("n_rounds_", "converged_", "history_", "n_features_in_", "cohort_")


# ------------------------------------------------------------------ pseudo labels


def pseudo_labels(
    scores: Float[np.ndarray, " N"],
    positive: Bool[np.ndarray, " B"],
    offsets: Int[np.ndarray, " bags_and_one"],
    top: float,
    low: float,
) -> Int[np.ndarray, " N"]:
    """1, 0 or LEFT_OUT for every instance, by its rank in its bag.

    In a positive bag of n instances the max(1, floor(top n)) that score highest are positive and
    the floor(low n) that score lowest negative; of equal scores the earlier instance ranks
    higher. Every instance of a negative bag is negative.

    >>> pseudo_labels(np.array([0.1, 0.9, 0.4, 0.8, 7.0]), np.array([True, False]),
    ...               np.array([0, 4, 5]), top=0.25, low=0.5)
    array([ 0,  1,  0, -1,  0])
    """
    sizes, bag = np.diff(offsets), bag_index(offsets)
    order = np.lexsort((-scores, bag))  # stable: equal scores stay in the order of the rows
    rank = np.empty(len(scores), dtype=np.int64)
    rank[order] = np.arange(len(scores)) - offsets[:-1][bag]
    n_top = np.maximum(1, _share_of(top, sizes))
    n_low = np.minimum(_share_of(low, sizes), sizes - n_top)
    labels = np.full(len(scores), LEFT_OUT)
    labels[rank < n_top[bag]] = 1
    labels[rank >= (sizes - n_low)[bag]] = 0
    labels[~positive[bag]] = 0
    return labels


def _share_of(share: float, sizes: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """floor(share n), where 0.29 of 100 is 29: the product's rounding must not lose one."""
    return np.floor(share * sizes * (1 + 1e-12)).astype(np.int64)


@dataclass(frozen=True)
class Lesson:
    """What a classifier is taught in a round: rows, their labels, their weights.

    A row may come twice, once with each label, when its label is soft.
    """

    rows: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]

    @classmethod
    def of(
        cls, labels: Int[np.ndarray, " N"], probability: Float[np.ndarray, " N"] | None
    ) -> "Lesson":
        """The labelled instances; with their `probability` the others too, on both sides."""
        known = np.flatnonzero(labels != LEFT_OUT)
        hard = cls(known, labels[known], np.ones(len(known)))
        if probability is None:
            return hard
        soft = np.flatnonzero(labels == LEFT_OUT)
        p, one = probability[soft], np.ones(len(soft), dtype=np.int64)
        return cls(
            np.concatenate([hard.rows, soft, soft]),
            np.concatenate([hard.labels, one, 0 * one]),
            np.concatenate([hard.weights, p, 1 - p]),
        )

    def balanced(self) -> Float[np.ndarray, " n"]:
        """The weights, scaled so that both classes weigh the same and the mean weight is one."""
        per_class = np.bincount(self.labels, self.weights, minlength=2)
        return self.weights * len(self.rows) / (2 * per_class[self.labels])


# ------------------------------------------------------------------ classifiers as matrices

ACTIVATIONS = {
    "identity": lambda h: h,
    "relu": lambda h: np.maximum(h, 0),
    "tanh": np.tanh,
    "logistic": expit,
}


@dataclass(frozen=True)
class Layers:
    """A network with one output, the log odds; a linear classifier is one of a single layer."""

    weights: list[np.ndarray]
    biases: list[np.ndarray]
    activation: str = "identity"

    def log_odds(self, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """log P(h = 1) - log P(h = 0) of every row, in float64."""
        h = x.astype(np.float64)
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            h = (ACTIVATIONS[self.activation](h) if k else h) @ weight + bias
        return h[:, 0]

    def arrays(self) -> dict[str, np.ndarray]:
        """Weights and biases by name."""
        named = {f"layer{k}.weight": w for k, w in enumerate(self.weights)}
        return named | {f"layer{k}.bias": b for k, b in enumerate(self.biases)}

    @classmethod
    def restore(cls, arrays: dict[str, np.ndarray], n: int, activation: str) -> "Layers":
        """From what `arrays` named, n layers."""
        return cls(
            [arrays[f"layer{k}.weight"] for k in range(n)],
            [arrays[f"layer{k}.bias"] for k in range(n)],
            activation,
        )


def as_layers(classifier: Any) -> Layers | None:
    """A fitted classifier of scikit-learn as matrices; None where it is something else."""
    if type(classifier) is MLPClassifier:
        return Layers(
            [w.astype(np.float64) for w in classifier.coefs_],
            [b.astype(np.float64) for b in classifier.intercepts_],
            classifier.activation,
        )
    logistic = type(classifier) is LogisticRegression or (
        type(classifier) is SGDClassifier and classifier.loss == "log_loss"
    )
    if not logistic:
        return None
    weight, bias = classifier.coef_.T, np.atleast_1d(classifier.intercept_)
    return Layers([weight.astype(np.float64)], [bias.astype(np.float64)])


class PseudoLabelMIL(BagClassifier):
    """A classifier of instances, trained in rounds on labels it gives them itself (PS-MIL).

    Instances of negative bags are negative in every round. Those of positive bags are all
    positive in the first; from then on, in every positive bag, the share `top` that the
    classifier of the round before scores highest (at least one) is positive, the share `low`
    that it scores lowest is negative, and what lies between is as `rest` says. The rounds end
    when no label changes any more, or after `n_rounds`.

    The probability of a bag is the largest among its instances. Where the classifier takes
    sample weights both classes weigh the same in every round, since positive instances are few:
    without weights all probabilities would be small, with them they are those of a world with as
    many positive as negative instances. So is the largest of a bag: it ranks bags well and is no
    calibrated probability (scikit-learn's CalibratedClassifierCV makes it one).

    Parameters
    ----------
    classifier : scikit-learn classifier or None
        Anything with `fit` and `predict_proba`; a new copy is trained in every round. One with a
        `class_weight` of its own keeps it and gets no balancing weights. None: a network with
        one hidden layer, trained on from round to round.
    hidden, epochs : int
        Units of that network, and how often it sees its instances in a round.
    n_rounds : int
        Most rounds.
    top, low : float
        Shares of the instances of a positive bag that are labelled positive and negative.
    rest : "left_out" or "soft"
        The other instances of positive bags are not trained on; or count for both classes,
        weighted by the probability of each (needs a classifier that takes sample weights).
    standardize, n_components : bool, int or None
        Standardise the columns of the features; or reduce them to PCA scores first.
    random_state : int, Generator or None
        Seeds the network, or a classifier whose own random_state is None.
    verbose : bool
        Show progress lines while fitting.

    Attributes
    ----------
    n_rounds_, converged_ : int, bool
        Rounds trained; whether the labels had stopped changing.
    history_ : list of dict
        For every round how many instances were positive, negative and between, and the share of
        those in positive bags whose label the round changed.
    classifier_ : the trained classifier; None in a model that was loaded.
    classes_, n_features_in_, feature_mean_, feature_scale_, feature_components_, cohort_

    Examples
    --------
    >>> import numpy as np
    >>> from gpmil import Bags
    >>> from gpmil.models.pseudo_label import PseudoLabelMIL
    >>> rng = np.random.default_rng(0)
    >>> x = [rng.normal(size=(8, 3)) + 3 * (b % 2) * (np.arange(8) < 3)[:, None] for b in range(20)]
    >>> bags = Bags.from_arrays(x, labels=[b % 2 for b in range(20)])
    >>> model = PseudoLabelMIL(top=0.3, random_state=0).fit(bags)
    >>> float(model.score(bags)) > 0.8
    True
    """

    classifier_: Any
    layers_: Layers | None  # the classifier as matrices, where it is no more than that
    history_: list[dict[str, Any]]
    feature_mean_: np.ndarray
    feature_scale_: np.ndarray
    feature_components_: np.ndarray | None
    cohort_: dict[str, Any]

    def __init__(
        self,
        *,
        classifier=None,
        hidden=128,
        epochs=5,
        n_rounds=10,
        top=0.2,
        low=0.2,
        rest="left_out",
        standardize=True,
        n_components=None,
        random_state=None,
        verbose=False,
    ):
        self.classifier = classifier
        self.hidden = hidden
        self.epochs = epochs
        self.n_rounds = n_rounds
        self.top = top
        self.low = low
        self.rest = rest
        self.standardize = standardize
        self.n_components = n_components
        self.random_state = random_state
        self.verbose = verbose

    # --- Fit ----------------------------------------------------------------------------------

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        labels, self.classes_ = training_labels(bags, y)
        self.n_features_in_ = bags.n_features
        self.cohort_ = cohort_card(bags, labels)
        self._fit_feature_map(bags.features)
        x = np.concatenate([part.astype(_precision(bags)) for part in self._inputs(bags)])
        self._train_in_rounds(x, labels == 1, bags.offsets)

    def _train_in_rounds(
        self,
        x: Float[np.ndarray, "N d"],
        positive: Bool[np.ndarray, " B"],
        offsets: Int[np.ndarray, " bags_and_one"],
    ) -> None:
        seeds = generator(self.random_state).integers(2**31, size=int(self.n_rounds))
        uncertain = np.flatnonzero(positive[bag_index(offsets)])
        labels = pseudo_labels(np.zeros(len(x)), positive, offsets, top=1.0, low=0.0)
        scores = np.zeros(len(x))
        self.classifier_, self.converged_ = None, False
        self.history_ = []
        for seed in seeds:
            soft = expit(scores) if self.rest == "soft" else None
            self.classifier_ = self._train(x, Lesson.of(labels, soft), int(seed))
            self.layers_ = as_layers(self.classifier_)
            scores[uncertain] = self._log_odds(_pieces(x, uncertain))
            changed = pseudo_labels(scores, positive, offsets, float(self.top), float(self.low))
            self._note(labels, float((changed != labels)[uncertain].mean()))
            if (changed == labels).all():
                self.converged_ = True
                break
            labels = changed
        self.n_rounds_ = len(self.history_)

    def _note(self, labels: Int[np.ndarray, " N"], changed: float) -> None:
        left_out, negative, positive = np.bincount(labels - LEFT_OUT, minlength=3).tolist()
        entry = {"positive": positive, "negative": negative, "between": left_out}
        self.history_.append(entry | {"changed": changed})
        logger.info(
            "round %d: %d positive, %d negative, %d between; %.1f %% of the labels in positive "
            "bags change",
            len(self.history_), positive, negative, left_out, 100 * changed,
        )  # fmt: skip

    def _train(self, x: Float[np.ndarray, "N d"], lesson: Lesson, seed: int) -> Any:
        whole = len(lesson.rows) == len(x) and self.rest != "soft"
        part = x if whole else x[lesson.rows]
        if self.classifier is None:
            return self._train_network(part, lesson, seed)
        classifier = _seeded(clone(self.classifier), seed)
        try:
            if _takes_weights(classifier):
                weights = lesson.balanced() if _unweighted(classifier) else lesson.weights
                classifier.fit(part, lesson.labels, sample_weight=weights)
            else:
                classifier.fit(part, lesson.labels)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"the classifier {classifier!r} could not be trained on {len(part)} instances "
                f"with {part.shape[1]} columns: {error}"
            ) from error
        return classifier

    def _train_network(
        self, x: Float[np.ndarray, "n d"], lesson: Lesson, seed: int
    ) -> MLPClassifier:
        """`epochs` more passes of the network, which is new in the first round."""
        network = self.classifier_
        if network is None:
            # An int would shuffle every pass alike.
            network = MLPClassifier((int(self.hidden),), random_state=np.random.RandomState(seed))
        # A few hundred instances need small steps, or there would be hardly any.
        network.batch_size = min(len(x), int(np.clip(len(x) // STEPS, *BATCH)))
        weights = {"sample_weight": lesson.balanced()} if _takes_weights(network) else {}
        for _ in range(int(self.epochs)):
            network.partial_fit(x, lesson.labels, classes=[0, 1], **weights)
        return network

    def _inputs(self, bags: Bags) -> Iterator[Float[np.ndarray, "n d"]]:
        """What the classifier sees, some rows at a time."""
        found = self._feature_map()
        for start in range(0, bags.n_instances, ROWS):
            yield found(bags.features[start : start + ROWS]).numpy()

    def _check_settings(self) -> None:
        generator(self.random_state)
        for name in ("hidden", "epochs", "n_rounds"):
            count(name, getattr(self, name), least=1)
        for name in ("standardize", "verbose"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.n_components is not None:
            count("n_components", self.n_components, least=1)
        one_of("rest", self.rest, ("left_out", "soft"))
        self._check_shares()
        self._check_classifier()

    def _check_shares(self) -> None:
        for name, value in (("top", self.top), ("low", self.low)):
            if not is_number(value) or not 0 <= float(value) <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}.")
        if self.top + self.low > 1 + 1e-12:
            raise ValueError(
                f"top + low must be at most 1, the whole bag; got {self.top} + {self.low}."
            )

    def _check_classifier(self) -> None:
        given = self.classifier
        if given is None:
            given = MLPClassifier()
        elif isinstance(given, type) or not all(
            hasattr(given, method) for method in ("fit", "predict_proba", "get_params")
        ):
            name = given.__name__ if isinstance(given, type) else type(given).__name__
            raise ValueError(
                "classifier must be a scikit-learn classifier with fit and predict_proba, or None; "
                f"got {'the class ' if isinstance(given, type) else ''}{name}. Pass an instance "
                "such as LogisticRegression(); of an SVM, one with probability=True."
            )
        if _takes_weights(given):
            return
        name = type(given).__name__
        if self.rest == "soft":
            raise ValueError(
                f"rest='soft' needs a classifier whose fit takes sample_weight, {name} does not. "
                "Use rest='left_out' or another classifier."
            )
        logger.warning("%s takes no sample weights: the classes are not balanced.", name)

    # --- Predict ------------------------------------------------------------------------------

    def log_proba_negative(self, bags) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """log P(y = 0) of each bag, one minus the largest probability in it; its error is zero."""
        return self._bags_and_instances(bags)[:2]

    def predict_instances(self, bags) -> InstancePredictions:
        """P(h_i = 1) of every instance; `mean` is its log odds.

        The classifier states no uncertainty of its own: `std` is one throughout, so that
        mean / std ranks instances as their probabilities do.
        """
        return self._bags_and_instances(bags)[2]

    def _bags_and_instances(
        self, bags
    ) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"], InstancePredictions]:
        bags = self._check_predictable(bags)
        with np.errstate(over="ignore", invalid="ignore"):
            logit = self._log_odds(self._inputs(bags))
        require_numbers(logit)
        instances = InstancePredictions(expit(logit), logit, np.ones(len(logit)), bags)
        # P(y = 0) = 1 - max_i p_i,  1 - expit(t) = expit(-t)
        log_p = log_expit(-_largest(logit, bags.offsets))
        return log_p, np.zeros(len(bags)), instances

    def _log_odds(self, pieces: Iterator[Float[np.ndarray, "n d"]]) -> Float[np.ndarray, " N"]:
        score = self._classifier_log_odds if self.layers_ is None else self.layers_.log_odds
        return np.concatenate([np.empty(0), *(score(piece) for piece in pieces)])

    def _classifier_log_odds(self, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        p = np.asarray(self.classifier_.predict_proba(x), dtype=np.float64)
        if p.shape != (len(x), 2) or not np.isfinite(p).all():
            raise ValueError(
                f"predict_proba of {type(self.classifier_).__name__} returned an array of shape "
                f"{p.shape}, or NaN; expected finite probabilities of shape ({len(x)}, 2)."
            )
        log_p = np.log(np.maximum(p, np.finfo(float).tiny))  # p may be rounded to zero
        return log_p[:, 1] - log_p[:, 0]

    # --- Files --------------------------------------------------------------------------------

    def save(self, path) -> None:
        """Write the model to a folder (safetensors and JSON); `gpmil.load` reads it.

        Only where the classifier is the network, or a LogisticRegression, an SGDClassifier with
        loss="log_loss" or an MLPClassifier: others are more than a few matrices.
        """
        check_is_fitted(self)
        persistence.write(path, *self._saved())

    def _saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        if self.layers_ is None:
            raise ValueError(
                f"a model with classifier {type(self.classifier_).__name__} cannot be saved as "
                f"arrays: only classifier=None and {sorted(STORED)} can. Keep the object itself "
                "with joblib.dump(model, file), and load such files only from people you trust."
            )
        arrays = {k: getattr(self, k) for k in ARRAYS if getattr(self, k) is not None}
        settings = self.get_params(deep=False)
        del settings["classifier"]
        card = {
            "class": type(self).__name__,
            "settings": {k: plain(v) for k, v in settings.items()},
            "classifier": None if self.classifier is None else _described(self.classifier),
            "activation": self.layers_.activation,
            "fitted": {k: getattr(self, k) for k in NUMBERS},
            "versions": package_versions(),
        }
        return arrays | self.layers_.arrays(), card

    @classmethod
    def _from_saved(cls, arrays: dict[str, np.ndarray], card: dict[str, Any], kernel=None):
        if kernel is not None:
            raise ValueError("a PseudoLabelMIL has no kernel: load it without kernel=.")
        settings = saved_checks.mapping(card, "settings")
        known = cls().get_params(deep=False)
        del known["classifier"]
        saved_checks.check_known("settings", settings, known, cls.__name__)
        model = cls(**settings)
        if saved_checks.entry(card, "classifier") is not None:
            model.classifier = _restored(saved_checks.mapping(card, "classifier"))
        saved_checks.as_damage("settings", model._check_settings)
        fitted = saved_checks.mapping(card, "fitted")
        saved_checks.check_numbers(fitted, saved_checks.ROUNDS)
        sizes = saved_checks.check_features(arrays, fitted, model.n_components)
        for name in ARRAYS:
            setattr(model, name, arrays.get(name))
        for name in NUMBERS:
            setattr(model, name, fitted[name])
        activation = saved_checks.entry(card, "activation")
        saved_checks.check_same("activation", activation, model._activation())
        widths = [sizes["d"], *model._hidden_widths(), 1]
        shapes = _layer_shapes(widths)
        saved_checks.check_arrays(arrays, {k: (v, "finite") for k, v in shapes.items()}, sizes)
        model.layers_ = Layers.restore(arrays, len(widths) - 1, activation)
        model.classifier_ = None
        return model

    def _hidden_widths(self) -> list[int]:
        """Units between inputs and output, as the settings say."""
        if self.classifier is None:
            return [int(self.hidden)]
        if isinstance(self.classifier, MLPClassifier):
            return np.atleast_1d(self.classifier.hidden_layer_sizes).tolist()
        return []

    def _activation(self) -> str:
        if self.classifier is None:
            return MLPClassifier().activation
        return getattr(self.classifier, "activation", Layers.activation)


def _layer_shapes(widths: Sequence[int]) -> dict[str, saved_checks.Shape]:
    """The arrays of layers from the first width to the last."""
    shapes: dict[str, saved_checks.Shape] = {}
    for k, (n_in, n_out) in enumerate(pairwise(widths)):
        shapes |= {f"layer{k}.weight": (n_in, n_out), f"layer{k}.bias": (n_out,)}
    return shapes


def _described(classifier: Any) -> dict[str, Any]:
    """Class and settings of a classifier that is saved, as JSON."""
    settings = classifier.get_params(deep=False)
    described = {k: plain(v) for k, v in settings.items()}
    lost = [k for k, v in described.items() if v is None and settings[k] is not None]
    lost = [k for k in lost if k != "random_state"]  # the state of a generator is not kept
    if lost:
        raise ValueError(
            f"the setting {lost[0]}={settings[lost[0]]!r} of {type(classifier).__name__} cannot "
            "be saved as JSON. Keep the object itself with joblib.dump(model, file), and load "
            "such files only from people you trust."
        )
    return {"name": type(classifier).__name__, "settings": described}


def _restored(card: dict[str, Any]) -> Any:
    """The classifier that `_described` described, not trained; JSON has made lists of tuples."""
    name, settings = saved_checks.entry(card, "name"), saved_checks.mapping(card, "settings")
    saved_checks.as_damage("classifier", lambda: one_of("name", name, tuple(STORED)))
    saved_checks.check_known("classifier", settings, STORED[name]().get_params(), name)
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    classifier = STORED[name](**given)
    saved_checks.as_damage("classifier", classifier._validate_params)
    return classifier


def _precision(bags: Bags) -> type:
    """Half the memory where the features are not double either."""
    return np.float64 if bags.features.dtype == np.float64 else np.float32


def _pieces(
    x: Float[np.ndarray, "N d"], rows: Int[np.ndarray, " n"]
) -> Iterator[Float[np.ndarray, "m d"]]:
    for start in range(0, len(rows), ROWS):
        yield x[rows[start : start + ROWS]]


def _largest(
    values: Float[np.ndarray, " N"], offsets: Int[np.ndarray, " bags_and_one"]
) -> Float[np.ndarray, " B"]:
    return np.maximum.reduceat(values, offsets[:-1]) if len(offsets) > 1 else np.empty(0)


def _takes_weights(classifier: Any) -> bool:
    return has_fit_parameter(classifier, "sample_weight")


def _unweighted(classifier: Any) -> bool:
    return classifier.get_params().get("class_weight") is None


def _seeded(classifier: Any, seed: int) -> Any:
    """With `seed` wherever a random_state was left open."""
    params = classifier.get_params(deep=True)
    is_open = [k for k in params if k.split("__")[-1] == "random_state" and params[k] is None]
    return classifier.set_params(**dict.fromkeys(is_open, seed))
