"""Decisions with an error rate: calibrated slides, slides to accept, patches to mark.

No model in here: arrays in, arrays out. What comes in is *out-of-fold* (`folds` keeps patients
together): every score is by a model that has not seen the patient it is about.

What is promised, and what for:

* `SlideCalibrator`: probabilities that mean what they say, on slides like those of the cohort.
* `ReferRule`: with probability 1 - delta the error among accepted slides is at most alpha. The
  slides (or patients) must be independent draws of what comes later, and a slide's chance of being
  wrong must not rise with its confidence.
* `p_values`: all patches of a negative bag are negative, so held-out negative bags show how high
  negative patches score. P(p <= a) <= a for a patch *exchangeable with those of negative bags*.
  Benign tissue beside a lesion is not: it may look different, the coupling pulls it towards the
  lesion, and nothing is promised about it.
* `benjamini_hochberg`: among marked patches the share of negative ones is on average at most
  rate x share of negatives, under the same condition.

What dependence between patches does. p-values that share a reference are positively dependent in
the way (PRDS) that Benjamini-Hochberg allows, if patches are otherwise independent. Patches of one
bag are not, and this costs twice. The rate is a mean over cohorts: the realised one scatters the
more, the more a bag's patches move together (simulated, 36 reference bags, rate x share = 8 %:
standard deviation 2 points if independent, 8 at correlation .7). And the reference is worth its
bags rather than its patches: if bags are exchangeable but patches are not, then of B reference bags
of equal size P(p <= a) <= a + (1 - a) / (B + 1), and `weights="bag"` takes the excess away.

The share of negatives is not estimated (Storey) to use up the rate: where benign tissue scores high
that estimate is too low, and it would worsen the one case in which the rate is missed.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from logging import getLogger
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from scipy.special import expit, logit, ndtri
from scipy.stats import beta, binom
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from gpmil.data.checks import count, listed

logger = getLogger("gpmil")
NEEDED = 5  # bags of each class, to calibrate slides
ROUNDING = 1e-9  # relative: p-values are fractions and often meet their limit exactly
FARTHEST, EDGE, HALVINGS = 1e4, 1 - 1e-12, 64  # where a saddlepoint is looked for, and how long

# ------------------------------------------------------------------ folds


def folds(
    labels: Int[np.ndarray, " B"],
    groups: Shaped[np.ndarray, " B"] | None = None,
    n_folds: int = 5,
    seed: int = 0,
    unit: str = "patient",
) -> Int[np.ndarray, " B"]:
    """The fold of every bag: stratified by label, patients (groups) kept together.

    Every fold holds a negative bag and every training part both classes. Where n_folds are too
    many for that there are fewer, at least two; it is said once, with `unit` for what groups are.

    >>> folds(np.array([0, 0, 0, 1, 1, 1]), np.array(list("aabbcc")), n_folds=2)
    array([1, 1, 0, 0, 1, 1])
    """
    labels = _zero_one(labels, len(labels))
    if n_folds < 2:
        raise ValueError(f"n_folds: expected at least 2, found {n_folds}.")
    _require_two_of_each(labels, groups)
    negative = np.flatnonzero(labels == 0) if groups is None else np.unique(groups[labels == 0])
    candidates = (
        _stratified(labels, groups, k, seed) for k in range(min(n_folds, len(negative)), 1, -1)
    )
    fold = next((fold for fold in candidates if _fair(fold, labels)), None)
    if fold is None:
        fold = _halves(labels, groups)
    if fold.max() + 1 < n_folds:
        kind = "negative bags" if groups is None else f"{unit}s with a negative bag"
        found = f"{fold.max() + 1} folds instead of {n_folds}"
        logger.warning("%s: there are %d %s.", found, len(negative), kind)
    return fold


def _stratified(labels: np.ndarray, groups: np.ndarray | None, k: int, seed: int) -> np.ndarray:
    splitter = StratifiedKFold if groups is None else StratifiedGroupKFold
    fold = np.empty(len(labels), dtype=np.int64)
    with warnings.catch_warnings():  # fewer positive bags than folds: `_fair` decides
        warnings.simplefilter("ignore", UserWarning)
        split = splitter(k, shuffle=True, random_state=seed).split(labels, labels, groups)
        for f, (_, held_out) in enumerate(split):
            fold[held_out] = f
    return fold


def _fair(fold: np.ndarray, labels: np.ndarray) -> bool:
    """A negative bag in every fold, and not all positive ones in the same.

    Then every training part has both classes: its negatives are those of another fold.
    """
    everywhere = set(fold[labels == 0]) == set(range(fold.max() + 1))
    return bool(everywhere and len(set(fold[labels == 1])) > 1)


def _halves(labels: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Two fair folds, which exist if two patients have negative and two have positive bags.

    The greedy splitter can miss them. Patients of a kind alternate, beginning with fold 0 if they
    have both classes and with fold 1 otherwise: a lone patient with both faces all the others.
    """
    patient = np.arange(len(labels)) if groups is None else _codes(groups)
    negative, positive = (np.bincount(patient, labels == y) > 0 for y in (0, 1))
    half = np.empty(len(negative), dtype=np.int64)
    for kind in (negative & positive, negative & ~positive, positive & ~negative):
        start = 0 if (negative & positive & kind).any() else 1
        half[kind] = (start + np.arange(kind.sum())) % 2
    return half[patient]


def _codes(values: np.ndarray) -> Int[np.ndarray, " n"]:
    return np.unique(values, return_inverse=True)[1]


def _require_two_of_each(labels: np.ndarray, groups: np.ndarray | None) -> None:
    _check_groups(groups, len(labels))
    for y, name in enumerate(("negative", "positive")):
        found = np.flatnonzero(labels == y)
        if len(found) < 2:
            raise ValueError(
                f"calibration and flags need at least 2 {name} bags (better 50), found "
                f"{len(found)} among {count(len(labels), 'bag')}. Check the label column, or add "
                f"{name} bags."
            )
        holders = None if groups is None else np.unique(groups[found])
        if holders is not None and len(holders) == 1:
            raise ValueError(
                f"flags need {name} bags of at least two patients (groups); found 1: "
                f"{str(holders[0])!r} has all {len(found)} {name} bags. Patients are kept "
                f"together, so a model trained without this one would see no {name} bag. Add "
                "patients, or, if the bags are independent, drop the groups (groups=None)."
            )


# ------------------------------------------------------------------ patches: p-values


@dataclass(frozen=True)
class ConformalReference:
    """How high the patches of held-out negative bags score: fold k's, scored by model k.

    `vars(reference)` are the arrays to save; `ConformalReference(**arrays)` has them back.
    """

    scores: Float[np.ndarray, " n"]  # ascending within a fold
    offsets: Int[np.ndarray, " edges"]  # K + 1; fold k is scores[offsets[k] : offsets[k + 1]]
    bag: Int[np.ndarray, " n"]  # which training bag (or patient) a score belongs to

    @classmethod
    def build(
        cls,
        scores: Float[np.ndarray, " n"],
        fold: Int[np.ndarray, " n"],
        bag: Int[np.ndarray, " n"],
        n_folds: int,
    ) -> "ConformalReference":
        """From patches of negative bags in any order: score by the fold's own model, fold, bag.

        Patients in place of bags are allowed: then `weights="bag"` counts patients.
        """
        _refuse_nan(scores, "scores of negative bags")
        sizes = np.bincount(fold, minlength=n_folds)
        if len(sizes) > n_folds or not sizes.all():
            raise ValueError(
                f"conformal p-values need patches of negative bags in each of {n_folds} folds, "
                f"found {sizes.tolist()} patches a fold. Make the folds with calibration.folds."
            )
        order = np.lexsort((scores, fold))
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return cls(scores[order], offsets, bag[order])

    @property
    def fold(self) -> Int[np.ndarray, " n"]:
        """The fold of each score."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def weight(self, weights: str) -> Float[np.ndarray, " n"]:
        """1 a patch, or 1 a bag, shared among its patches."""
        if weights not in ("patch", "bag"):
            raise ValueError(f"weights: expected 'patch' or 'bag', found {weights!r}.")
        sizes = np.bincount(_codes(self.bag))
        return np.ones(len(self.bag)) if weights == "patch" else 1 / sizes[_codes(self.bag)]

    def smallest(self, weights: str = "patch") -> float:
        """The smallest p-value there can be: 1 / (1 + number of patches, or of bags)."""
        n = len(self.scores) if weights == "patch" else round(self.weight(weights).sum())
        return 1 / (1 + n)


def p_values(
    reference: ConformalReference,
    scores: Float[np.ndarray, "K N"],
    *,
    weights: str = "patch",
    own_fold: Int[np.ndarray, " N"] | None = None,
    own_bag: Int[np.ndarray, " N"] | None = None,
) -> Float[np.ndarray, " N"]:
    """Conformal p-values of N patches scored by each of the K models; high scores are suspicious.

    Model k's score is compared with fold k's reference alone, and the ranks are pooled, so scores
    of different models never meet. Ties count against the patch.

    weights : "patch" needs negative patches to be exchangeable with the reference patches.
        "bag" needs it of bags only: it counts every negative bag once, and holds for a random patch
        of a random negative bag. It cannot fall below 1 / (1 + bags): for large cohorts.
    own_fold, own_bag : for patches of the *training* bags, their fold and bag. Only row
        own_fold[i] of column i is read (the one model that has not seen the patch), and its own bag
        is left out of the reference, so that a bag is not compared with itself.

    With K = 1, or with `own_fold`, P(p <= a) <= a. The pooled p-value is in effect a mean of K such
    p-values: near a if the models agree, the further below the more they disagree (a patch must
    look odd to all of them), though only about 2 a is proved whatever the models do.

    >>> reference = ConformalReference.build(
    ...     np.array([0.1, 0.4, 0.8, -3.0]), *np.array([[0, 0, 0, 1], [5, 5, 6, 7]]), n_folds=2
    ... )
    >>> p_values(reference, np.array([[0.4, 0.9], [-4.0, -1.0]]))
    array([0.8, 0.2])
    """
    n_folds = len(reference.offsets) - 1
    if len(scores) != n_folds:
        raise ValueError(
            f"scores: expected one row for each of {n_folds} models, found shape {scores.shape}."
        )
    if own_fold is not None:
        own_scores = scores[own_fold, np.arange(scores.shape[1])]
        return _own_p_values(reference, own_scores, weights, own_fold, own_bag)
    _refuse_nan(scores, "scores")
    w = reference.weight(weights)
    pieces = [slice(*ends) for ends in pairwise(reference.offsets.tolist())]
    # p = (1 + sum_k r_k) / (1 + sum_k n_k), r_k = #{reference scores of fold k >= s_k}
    r = sum(_above(reference.scores[k], w[k], s) for k, s in zip(pieces, scores))
    return np.minimum((1 + r) / (1 + w.sum()), 1.0)


def _own_p_values(
    reference: ConformalReference,
    scores: Float[np.ndarray, " N"],
    weights: str,
    fold: Int[np.ndarray, " N"],
    bag: Int[np.ndarray, " N"] | None,
) -> Float[np.ndarray, " N"]:
    if bag is None:
        raise ValueError("own_bag: expected with own_fold, to compare no bag with itself.")
    _refuse_nan(scores, "scores")
    w = reference.weight(weights)
    r_fold, n_fold = _above_within(reference.scores, w, reference.fold, scores, fold)
    r_bag, n_bag = _above_within(reference.scores, w, reference.bag, scores, bag)
    # p = (1 + r) / (1 + n) over the patches of the own fold that are not of the own bag
    r, n = np.maximum(r_fold - r_bag, 0), np.maximum(n_fold - n_bag, 0)
    return np.minimum((1 + r) / (1 + n), 1.0)


def _above(ascending: np.ndarray, w: np.ndarray, s: np.ndarray) -> Float[np.ndarray, " N"]:
    """Weight of the reference scores >= s."""
    from_here = np.append(np.cumsum(w[::-1])[::-1], 0.0)
    return from_here[np.searchsorted(ascending, s, side="left")]


def _above_within(
    reference: np.ndarray, w: np.ndarray, reference_key: np.ndarray, s: np.ndarray, key: np.ndarray
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Weight of the reference scores >= s, and of all, among those with the same key."""
    r, n = np.zeros(len(s)), np.zeros(len(s))
    inside = dict(_rows(reference_key))
    for value, rows in _rows(key):
        if value in inside:
            same = inside[value]
            r[rows], n[rows] = _above(reference[same], w[same], s[rows]), w[same].sum()
    return r, n


def _rows(key: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Each value and where it stands, in order."""
    order = np.argsort(key, kind="stable")
    values, starts = np.unique(key[order], return_index=True)
    return zip(values.tolist(), np.split(order, starts[1:]))


# ------------------------------------------------------------------ patches: flags


def benjamini_hochberg(
    p: Float[np.ndarray, " N"], rate: float, groups: Int[np.ndarray, " N"] | None = None
) -> Bool[np.ndarray, " N"]:
    """Which patches to mark, at a false discovery rate: over all, or within each group (slide).

    Over the cohort the rate is about all marks together; within slides it is about each slide, and
    holds of all marks only if slides with few marks are not mostly wrong ones.

    >>> benjamini_hochberg(np.array([0.001, 0.09, 0.04, 0.8]), 0.1)
    array([ True, False,  True, False])
    """
    _check_share(rate, "rate")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"p: expected p-values between 0 and 1, found {listed(p[~((p >= 0) & (p <= 1))])}."
        )
    groups = np.zeros(len(p), dtype=np.int64) if groups is None else _codes(groups)
    order = np.lexsort((p, groups))
    group, m = groups[order], np.bincount(groups)
    # i = 1, ..., m within each group, from its smallest p-value up
    i = 1 + np.arange(len(p)) - (np.cumsum(m) - m)[group]
    passed = p[order] <= rate * i / m[group] * (1 + ROUNDING)
    # marked: the k smallest, k the largest i with p_(i) <= rate i / m
    k = np.zeros(len(m), dtype=np.int64)
    np.maximum.at(k, group, np.where(passed, i, 0))
    flagged = np.empty(len(p), dtype=bool)
    flagged[order] = i <= k[group]
    return flagged


# ------------------------------------------------------------------ slides: probabilities


@dataclass(frozen=True)
class SlideCalibrator:
    """From a model's log odds of a positive slide to a calibrated probability; never falling.

    "sigmoid": expit(slope x + intercept), two numbers, right for small cohorts. "isotonic": steps
    through (knots, values), free in shape, for several hundred slides; ties what it joins.
    """

    method: str = "sigmoid"
    slope: float = 1.0
    intercept: float = 0.0
    knots: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    @classmethod
    def fit(
        cls,
        log_odds: Float[np.ndarray, " B"],
        labels: Int[np.ndarray, " B"],
        method: str = "sigmoid",
    ) -> "SlideCalibrator":
        """From out-of-fold log odds and the labels of the same bags."""
        if method not in ("sigmoid", "isotonic"):
            raise ValueError(f"method: expected 'sigmoid' or 'isotonic', found {method!r}.")
        x = np.asarray(log_odds, dtype=float)
        targets = _platt_targets(_zero_one(labels, len(x)))
        if not np.isfinite(x).all():
            raise ValueError(f"log_odds: expected finite numbers, found {listed(_not_finite(x))}.")
        if method == "sigmoid":
            return cls(method, *_sigmoid(x, targets))
        steps = IsotonicRegression(increasing=True).fit(x, targets)
        knots, values = steps.X_thresholds_.tolist(), steps.y_thresholds_.tolist()
        return cls(method, knots=tuple(knots), values=tuple(values))

    def predict(self, log_odds: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        """P(y = 1); never exactly 0 or 1."""
        x = np.asarray(log_odds, dtype=float)
        _refuse_nan(x, "log_odds")
        if self.method == "isotonic":
            return np.interp(x, self.knots, self.values)
        x = np.clip(x, -np.finfo(float).max, np.finfo(float).max)
        with np.errstate(over="ignore"):
            p = expit(self.slope * x + self.intercept)
        return np.clip(p, np.finfo(float).tiny, np.nextafter(1.0, 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self) | {"knots": list(self.knots), "values": list(self.values)}

    @classmethod
    def from_dict(cls, card: dict[str, Any]) -> "SlideCalibrator":
        """What `to_dict` gave."""
        return cls(**card | {"knots": tuple(card["knots"]), "values": tuple(card["values"])})


def _platt_targets(labels: np.ndarray) -> Float[np.ndarray, " B"]:
    """(n1 + 1) / (n1 + 2) for positives, 1 / (n0 + 2) for negatives (Platt 1999).

    They keep the slope finite where the classes separate, and probabilities off 0 and 1.
    """
    n0, n1 = np.bincount(labels, minlength=2)
    if min(n0, n1) < NEEDED:
        raise ValueError(
            f"calibrating slides needs at least {NEEDED} negative and {NEEDED} positive bags "
            f"(better 50 of each), found {n0} and {n1}. Add bags, or do without calibration."
        )
    return np.where(labels == 1, (n1 + 1) / (n1 + 2), 1 / (n0 + 2))


def _sigmoid(x: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """Slope >= 0 and intercept of Platt's regression on targets between 0 and 1."""
    scale = np.std(x) or 1.0
    z = np.tile((x - x.mean()) / scale, 2)[:, None]
    # a target t is a positive of weight t and a negative of weight 1 - t
    y, weight = np.repeat([1, 0], len(x)), np.concatenate([targets, 1 - targets])
    found = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(z, y, sample_weight=weight)
    slope, intercept = float(found.coef_[0, 0]), float(found.intercept_[0])
    if slope <= 1e-6:  # convex: the best slope >= 0 is then 0
        logger.warning(
            "slide calibration: positive bags do not get higher out-of-fold log odds than negative "
            "ones, so every slide gets the same probability. The model does not rank new slides."
        )
        return 0.0, float(logit(targets.mean()))
    return float(slope / scale), float(intercept - slope * x.mean() / scale)


def interval(
    draws: Float[np.ndarray, "S B"], level: float = 0.9
) -> tuple[Float[np.ndarray, " B"], Float[np.ndarray, " B"]]:
    """Equal-tailed interval of each slide's P(y = 1 | u) over S draws of u; by default 5-95 %.

    >>> interval(np.linspace(0, 1, 201)[:, None])
    (array([0.05]), array([0.95]))
    """
    low, high = np.quantile(draws, tails(level), axis=0)
    return low, high


def tails(level: float) -> tuple[float, float]:
    """The two quantiles between which an equal-tailed interval lies.

    >>> tails(0.5)
    (0.25, 0.75)
    """
    _check_share(level, "level")
    return (1 - level) / 2, (1 + level) / 2


def quadratic_quantile(
    a: float, b: Float[np.ndarray, " k"], B: Float[np.ndarray, "k k"], p: float
) -> float:
    """The p-quantile of a + b'x + x'B x / 2, x ~ N(0, I), by its saddlepoint approximation.

    Lugannani and Rice's formula for the probability below K'(t), in the form Phi(r*) of
    Barndorff-Nielsen, is searched for the t at which it is p.

    >>> round(quadratic_quantile(2.0, np.array([3.0, 4.0]), np.zeros((2, 2)), 0.95), 3)
    10.224
    """
    e, Q = np.linalg.eigh(B)
    c = (Q.T @ b) ** 2
    sd = math.sqrt(c.sum() + (e**2).sum() / 2)
    if not sd > 0:
        return float(a)
    # in units of sd; K exists while 1 - t e > 0
    e, c = e / sd, c / sd**2
    skew = 3 * (c * e).sum() + (e**3).sum()

    def at(t: float) -> tuple[float, float]:
        d = 1 - t * e
        # K = sum [t^2 c / d - log d] / 2 and its first two derivatives
        K = (t * t * c / d - np.log(d)).sum() / 2
        K1 = ((2 * t - t * t * e) * c / d**2 + e / d).sum() / 2
        K2 = (c / d**3 + e**2 / d**2 / 2).sum()
        r = math.copysign(math.sqrt(max(2 * (t * K1 - K), 0.0)), t)
        # r* = r + log(t sqrt(K'') / r) / r, with its limit at t = 0
        return K1, r + (math.log(t * math.sqrt(K2) / r) / r if abs(r) > 1e-3 else skew / 6)

    z = float(ndtri(p))
    lowest = max(-FARTHEST, EDGE / e[0] if e[0] < 0 else -np.inf)
    highest = min(FARTHEST, EDGE / e[-1] if e[-1] > 0 else np.inf)
    for _ in range(HALVINGS):
        t = (lowest + highest) / 2
        lowest, highest = (t, highest) if at(t)[1] < z else (lowest, t)
    return float(a + sd * at((lowest + highest) / 2)[0])


# ------------------------------------------------------------------ slides: refer or accept


def slides_needed(alpha: float, delta: float = 0.1) -> int:
    """The fewest slides, all of them right, that show an error of at most alpha.

    >>> slides_needed(0.05), slides_needed(0.1), slides_needed(0.01, delta=0.05)
    (45, 22, 299)
    """
    _check_share(alpha, "alpha")
    _check_share(delta, "delta")
    # (1 - alpha)^n <= delta
    return math.ceil(math.log(delta) / math.log1p(-alpha) * (1 - ROUNDING))


@dataclass(frozen=True)
class ReferRule:
    """Accept a slide if its confidence max(p, 1 - p) reaches a threshold, refer it otherwise.

    With probability 1 - delta over cohorts the error among accepted slides is at most alpha,
    although the threshold is chosen on the same cohort: thresholds are tested from the strictest
    on, and the first that fails ends the walk (fixed-sequence testing). Too loose a threshold is
    kept only if the first too loose one passes its test, which has probability delta at most.
    Which thresholds are tested depends on no label.

    With groups the unit is the patient: counted once any slide of it is accepted, and as an error
    once any accepted slide of it is wrong. At most alpha of such *patients* are errors. That bounds
    the error among slides too, unless patients with more slides are wrong more often.

    The test is exact if units are independent and a unit's chance of being wrong does not rise with
    its confidence. It is about out-of-fold predictions: the final model has seen more bags.
    """

    alpha: float
    delta: float
    threshold: float | None  # None: nothing is accepted
    accepted: int  # slides (patients) of the cohort at that threshold
    errors: int  # wrong ones among them
    total: int  # slides (patients) of the cohort
    unit: str = "slide"

    @classmethod
    def fit(
        cls,
        probability: Float[np.ndarray, " B"],
        labels: Int[np.ndarray, " B"],
        alpha: float,
        delta: float = 0.1,
        groups: Shaped[np.ndarray, " B"] | None = None,
    ) -> "ReferRule":
        """From out-of-fold P(y = 1) and the labels of the same slides."""
        _check_share(alpha, "alpha")
        _check_share(delta, "delta")
        wrong = (probability > 0.5) != (_zero_one(labels, len(probability)) == 1)
        conf = confidence(probability)
        _check_groups(groups, len(wrong))
        patient = np.arange(len(wrong)) if groups is None else _codes(groups)
        # a patient is in once its surest slide is, and an error once its surest wrong slide is
        enters = _highest(conf, patient)
        errs = _highest(np.where(wrong, conf, -np.inf), patient)
        allowed = _allowed_errors(len(enters), alpha, delta)
        kept: tuple[float | None, int, int] = (None, 0, 0)
        for t in _thresholds(enters, allowed, conf.min(initial=1.0)):
            n, errors = int((enters >= t).sum()), int((errs >= t).sum())
            if errors > allowed[n]:
                break
            kept = (t, n, errors)
        unit = "slide" if groups is None else "patient"
        rule = cls(alpha, delta, *kept, total=len(enters), unit=unit)
        if rule.threshold is None:
            logger.warning("%s", rule)
        return rule

    def decide(self, probability: Float[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """True: accept the likelier class. False: refer the slide to somebody."""
        conf = confidence(probability)
        return np.zeros(len(conf), dtype=bool) if self.threshold is None else conf >= self.threshold

    @property
    def needed(self) -> int:
        """The fewest slides (patients), all of them right, that allow to accept any."""
        return slides_needed(self.alpha, self.delta)

    @property
    def bound(self) -> float:
        """Clopper-Pearson upper limit, at level 1 - delta, of the error among accepted slides."""
        if self.errors == self.accepted:
            return 1.0
        # P(Binomial(n, bound) <= e) = delta
        return float(beta.ppf(1 - self.delta, self.errors + 1, self.accepted - self.errors))

    def __str__(self) -> str:
        units = count(self.total, self.unit)
        if self.threshold is not None:
            return (
                f"accept at confidence {self.threshold:.4f} or more: {self.accepted:,} of {units}, "
                f"{self.errors} wrong; error at most {self.bound:.3f} <= {self.alpha:g} with "
                f"probability {1 - self.delta:g}"
            )
        why = "there are fewer" if self.total < self.needed else "among the surest some are wrong"
        return (
            f"no slide can be accepted: an error of at most {self.alpha:g} with probability "
            f"{1 - self.delta:g} takes {count(self.needed, self.unit)} that are all right, found "
            f"{units} ({why}). Add slides, or allow a larger alpha or delta."
        )


def confidence(probability: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
    """max(p, 1 - p), of the likelier class."""
    p = np.asarray(probability, dtype=float)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"probability: expected numbers from 0 to 1, found {listed(p[~((p >= 0) & (p <= 1))])}."
        )
    return np.maximum(p, 1 - p)


def _allowed_errors(n: int, alpha: float, delta: float) -> Int[np.ndarray, " sizes"]:
    """The most errors among 0, ..., n with an upper limit <= alpha; -1 where not even 0 will do.

    The limit is at most alpha if and only if P(Binomial(n, alpha) <= errors) <= delta.
    """
    first_above = binom.ppf(min(delta * (1 + ROUNDING), 1.0), np.arange(1, n + 1), alpha)
    return np.concatenate([[-1], first_above.astype(np.int64) - 1])


def _thresholds(enters: np.ndarray, allowed: np.ndarray, lowest: float) -> list[float]:
    """Confidences at which one more error is affordable, and the lowest; from the strictest on.

    Any sequence that ignores the labels is valid. This one takes no test that the next slide would
    make easier.
    """
    if allowed[-1] < 0:
        return []
    # allowed rises when the (i + 1)-th patient enters
    i = np.flatnonzero(np.diff(allowed) > 0)
    return [*np.sort(enters)[::-1][i].tolist(), float(lowest)]


def _highest(values: np.ndarray, patient: np.ndarray) -> Float[np.ndarray, " patients"]:
    highest = np.full(patient.max(initial=-1) + 1, -np.inf)
    np.maximum.at(highest, patient, values)
    return highest


# ------------------------------------------------------------------ checks


def _zero_one(labels: Any, n: int) -> Int[np.ndarray, " B"]:
    labels = np.asarray(labels)
    if labels.shape != (n,):
        raise ValueError(f"labels: expected one a bag, {n} in all, found shape {labels.shape}.")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(
            f"labels: expected 0 or 1, found {listed(labels[~np.isin(labels, (0, 1))])}. Leave out "
            "bags without a label."
        )
    return labels.astype(np.int64)


def _check_groups(groups: np.ndarray | None, n: int) -> None:
    if groups is not None and len(groups) != n:
        raise ValueError(f"groups: expected one a bag, {n} in all, found {len(groups)}.")


def _check_share(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise ValueError(
            f"{name}: expected a number between 0 and 1, both excluded, found {value}. Ten percent "
            "is 0.1."
        )


def _refuse_nan(values: np.ndarray, name: str) -> None:
    missing = np.isnan(values)
    if missing.any():
        raise ValueError(
            f"{name}: expected numbers, found NaN in {missing.sum():,} of {values.size:,} places. "
            "Were features missing?"
        )


def _not_finite(values: np.ndarray) -> list[float]:
    return values[~np.isfinite(values)].tolist()
