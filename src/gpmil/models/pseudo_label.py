"""PS-MIL: an instance classifier trained in rounds on pseudo labels (Schmidt et al.).

The family of methods that the paper compares itself with: where the Gaussian-process models
integrate over the labels of the instances, these guess them, train, and guess again.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import expit, log_expit
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier

from gpmil.data.bags import Bags
from gpmil.data.graphs import bag_index
from gpmil.models import saved_checks
from gpmil.models.base import InstancePredictions
from gpmil.models.checks import count, flag, generator, is_number, one_of, plain, require_numbers
from gpmil.models.instance_classifier import (
    Layers,
    as_layers,
    check_classifier,
    log_odds,
    new_network,
    train_on,
    trained,
)
from gpmil.models.lessons import LEFT_OUT, Lesson, pseudo_labels
from gpmil.models.saved import Arrays, Card, SavedModel

logger = logging.getLogger("gpmil")

ROWS = 8192  # instances scored at a time
STORED = {c.__name__: c for c in (LogisticRegression, SGDClassifier, MLPClassifier)}
"""Classifiers that are a few matrices, and are saved as such."""


@dataclass(kw_only=True, eq=False, repr=False)
class PseudoLabelSettings:
    """The settings of `PseudoLabelMIL`, which says what they mean."""

    classifier: Any = None
    hidden: Any = 128
    epochs: Any = 5
    n_rounds: Any = 10
    top: Any = 0.2
    low: Any = 0.2
    rest: Any = "left_out"
    standardize: Any = True
    n_components: Any = None
    random_state: Any = None
    verbose: Any = False


class PseudoLabelMIL(PseudoLabelSettings, SavedModel):
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

    NUMBERS = SavedModel.NUMBERS | {
        "n_rounds_": saved_checks.from_one,
        "converged_": flag,
        "history_": saved_checks.parts,
    }
    NOT_SETTINGS = ("classifier",)  # kept apart

    classifier_: Any
    layers_: Layers | None  # the classifier as matrices, where it is no more than that
    history_: list[dict[str, Any]]

    # --- Fit ----------------------------------------------------------------------------------

    def _fit(self, bags: Bags, y) -> None:
        self._check_settings()
        labels = self._remember_cohort(bags, y)
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
        """The classifier after one more round: a new copy, or the same network trained on."""
        whole = len(lesson.rows) == len(x) and self.rest != "soft"
        part = x if whole else x[lesson.rows]
        if self.classifier is not None:
            return trained(self.classifier, part, lesson, seed)
        network = self.classifier_ or new_network(int(self.hidden), seed)
        train_on(network, part, lesson, int(self.epochs))
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
            flag(name, getattr(self, name))
        if self.n_components is not None:
            count("n_components", self.n_components, least=1)
        one_of("rest", self.rest, ("left_out", "soft"))
        self._check_shares()
        check_classifier(self.classifier, self.rest)

    def _check_shares(self) -> None:
        for name, value in (("top", self.top), ("low", self.low)):
            if not is_number(value) or not 0 <= float(value) <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}.")
        if self.top + self.low > 1 + 1e-12:
            raise ValueError(
                f"top + low must be at most 1, the whole bag; got {self.top} + {self.low}."
            )

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
        given = partial(log_odds, self.classifier_)
        score = given if self.layers_ is None else self.layers_.log_odds
        return np.concatenate([np.empty(0), *(score(piece) for piece in pieces)])

    # --- Files --------------------------------------------------------------------------------

    def save(self, path) -> None:
        """Write the model to a folder (safetensors and JSON); `gpmil.load` reads it.

        Only where the classifier is the network, or a LogisticRegression, an SGDClassifier with
        loss="log_loss" or an MLPClassifier: others are more than a few matrices.
        """
        super().save(path)

    def _saved_besides(self) -> tuple[Arrays, Card]:
        if self.layers_ is None:
            raise ValueError(
                f"a model with classifier {type(self.classifier_).__name__} cannot be saved as "
                f"arrays: only classifier=None and {sorted(STORED)} can. Keep the object itself "
                "with joblib.dump(model, file), and load such files only from people you trust."
            )
        given = None if self.classifier is None else _described(self.classifier)
        card = {"classifier": given, "activation": self.layers_.activation}
        return self.layers_.arrays(), card

    @classmethod
    def _settings_besides(cls, arrays: Arrays, card: Card, kernel: Any) -> dict[str, Any]:
        besides = super()._settings_besides(arrays, card, kernel)
        if saved_checks.entry(card, "classifier") is not None:
            besides["classifier"] = _restored(saved_checks.mapping(card, "classifier"))
        return besides

    def _restore(self, arrays: Arrays, card: Card, sizes: saved_checks.Symbols) -> None:
        activation = saved_checks.entry(card, "activation")
        saved_checks.check_same("activation", activation, self._activation())
        widths = [sizes["d"], *self._hidden_widths(), 1]
        saved_checks.check_arrays(arrays, _layer_shapes(widths), sizes)
        self.layers_ = Layers.restore(arrays, len(widths) - 1, activation)
        self.classifier_ = None

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


def _layer_shapes(widths: Sequence[int]) -> saved_checks.Expected:
    """The arrays of layers from the first width to the last."""
    found: saved_checks.Expected = {}
    for k, (n_in, n_out) in enumerate(pairwise(widths)):
        found[f"layer{k}.weight"] = saved_checks.Array((n_in, n_out), "finite")
        found[f"layer{k}.bias"] = saved_checks.Array((n_out,), "finite")
    return found


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
