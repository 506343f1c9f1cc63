"""A classifier of instances: which will do, how one is trained, and its log odds.

Any classifier of scikit-learn that gives probabilities; without one, a network with one hidden
layer. Those that are a few matrices are kept as such (`Layers`).
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import expit
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.utils.validation import has_fit_parameter

from gpmil.models.lessons import Lesson

logger = logging.getLogger("gpmil")

BATCH = (16, 256)  # fewest and most instances in a step of the network
STEPS = 50  # in an epoch, where there are instances enough

# ------------------------------------------------------------------ as matrices

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


# ------------------------------------------------------------------ training


def trained(classifier: Any, x: Float[np.ndarray, "n d"], lesson: Lesson, seed: int) -> Any:
    """A new copy of the classifier, taught the lesson; x are its rows."""
    classifier = _seeded(clone(classifier), seed)
    weights = {}
    if _takes_weights(classifier):
        balanced = classifier.get_params().get("class_weight") is None
        weights["sample_weight"] = lesson.balanced() if balanced else lesson.weights
    try:
        classifier.fit(x, lesson.labels, **weights)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the classifier {classifier!r} could not be trained on {len(x)} instances "
            f"with {x.shape[1]} columns: {error}"
        ) from error
    return classifier


def new_network(hidden: int, seed: int) -> MLPClassifier:
    """One hidden layer, not yet trained."""
    # An int would shuffle every pass alike.
    return MLPClassifier((hidden,), random_state=np.random.RandomState(seed))


def train_on(network: MLPClassifier, x: Float[np.ndarray, "n d"], lesson: Lesson, n: int) -> None:
    """n more passes of the network over the rows of the lesson."""
    # A few hundred instances need small steps, or there would be hardly any.
    network.batch_size = min(len(x), int(np.clip(len(x) // STEPS, *BATCH)))
    weights = {"sample_weight": lesson.balanced()} if _takes_weights(network) else {}
    for _ in range(n):
        network.partial_fit(x, lesson.labels, classes=[0, 1], **weights)


def _takes_weights(classifier: Any) -> bool:
    return has_fit_parameter(classifier, "sample_weight")


def _seeded(classifier: Any, seed: int) -> Any:
    """With `seed` wherever a random_state was left open."""
    params = classifier.get_params(deep=True)
    is_open = [k for k in params if k.split("__")[-1] == "random_state" and params[k] is None]
    return classifier.set_params(**dict.fromkeys(is_open, seed))


# ------------------------------------------------------------------ log odds and checks


def log_odds(classifier: Any, x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
    """log P(h = 1) - log P(h = 0) of every row, from the probabilities of a trained classifier."""
    p = np.asarray(classifier.predict_proba(x), dtype=np.float64)
    if p.shape != (len(x), 2) or not np.isfinite(p).all():
        raise ValueError(
            f"predict_proba of {type(classifier).__name__} returned an array of shape "
            f"{p.shape}, or NaN; expected finite probabilities of shape ({len(x)}, 2)."
        )
    log_p = np.log(np.maximum(p, np.finfo(float).tiny))  # p may be rounded to zero
    return log_p[:, 1] - log_p[:, 0]


def check_classifier(given: Any, rest: str) -> None:
    """Insist on a classifier that gives probabilities, and weighs instances where `rest` asks."""
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
    if rest == "soft":
        raise ValueError(
            f"rest='soft' needs a classifier whose fit takes sample_weight, {name} does not. "
            "Use rest='left_out' or another classifier."
        )
    logger.warning("%s takes no sample weights: the classes are not balanced.", name)
