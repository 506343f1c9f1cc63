"""K models, each fitted without one fold of the cohort: what is known of bags no model has seen.

Their predictions of the bags they have not seen calibrate the slides, tell which slides can be
accepted, and say how high the patches of negative bags score (room decide).
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import expit

from gpmil.data.bags import Bags
from gpmil.data.folds import folds
from gpmil.decide.calibration import NEEDED, SlideCalibrator
from gpmil.decide.marks import ConformalReference, benjamini_hochberg, p_values
from gpmil.decide.patch_calibration import PatchCalibrator
from gpmil.decide.patch_calibration import calibrated as of_patches
from gpmil.decide.unlike import NEEDED as NEEDED_PATCHES
from gpmil.decide.unlike import Unlike
from gpmil.models.base import InstancePredictions, log_odds
from gpmil.models.checks import one_of, share
from gpmil.models.tissue_kinds import same_kind

logger = logging.getLogger("gpmil")
ARRAYS = ("labels", "groups", "fold", "fingerprints", "log_odds")
# Of log odds that are kept: not the last bits, in which the first run of all, while loops are
# compiled, has been seen to differ from later ones.
DIGITS = 11


@dataclass(frozen=True)
class Marks:
    """How patches are to be marked; checked whether or not the model can mark any."""

    rate: float
    within: str
    weights: str

    def __post_init__(self) -> None:
        one_of("within", self.within, ("bag", "cohort"))
        one_of("weights", self.weights, ("patch", "bag"))
        share("rate", self.rate)


def planned_folds(
    bags: Bags, labels: Int[np.ndarray, " B"], n_folds: int, seed: int, calibrated: bool
) -> Int[np.ndarray, " B"]:
    """The folds, before anything is fitted; a ValueError where there are too few bags for them."""
    fold = folds(labels, bags.groups, n_folds, seed)
    counts = np.bincount(labels, minlength=2)
    if calibrated and counts.min() < NEEDED:
        raise ValueError(
            f"calibrated=True needs at least {NEEDED} negative and "
            f"{NEEDED} positive bags (better 50 of each), found {counts[0]} and "
            f"{counts[1]}. Add bags, or fit with calibrated=False."
        )
    return fold


@dataclass(frozen=True)
class CrossFit:
    """The K models, what they said of the bags held out, and what follows from it."""

    models: list[Any]
    labels: Int[np.ndarray, " B"]
    groups: Int[np.ndarray, " B"]  # patients as numbers; every bag its own where none were given
    fold: Int[np.ndarray, " B"]
    fingerprints: Int[np.ndarray, " B"]
    log_odds: Float[np.ndarray, " B"]  # of a positive bag, out of fold
    reference: ConformalReference
    calibrator: SlideCalibrator | None  # None: slides are not calibrated
    unlike: Unlike | None = None  # None: too few patches, or a model saved before
    patches: PatchCalibrator | None = None  # None: not calibrated, or too few labelled patches

    @classmethod
    def fit(
        cls,
        model: Any,
        bags: Bags,
        labels: np.ndarray,
        fold: Int[np.ndarray, " B"],
        calibrated: bool,
        y: np.ndarray | None = None,
    ) -> "CrossFit":
        """Fit copies of `model`, its settings fixed, without one fold each, to y or the labels."""
        y, groups = labels if y is None else y, _numbered(bags)
        n_folds = int(fold.max()) + 1
        models, odds = [], np.empty(len(bags))
        scores = np.empty(bags.n_instances)
        for k in range(n_folds):
            logger.info("cross-fitting: model %d of %d", k + 1, n_folds)
            models.append(model.with_settings_fixed())
            models[k].learns_range = False  # novelty and intervals are asked of the model itself
            models[k].fit(bags[fold != k], y[fold != k])
            found = models[k].predict_all(bags[fold == k])
            odds[fold == k] = log_odds(found.log_proba_negative).round(DIGITS)
            scores[fold[bags.bag_index] == k] = suspicion(found.instances)
        negative = labels[bags.bag_index] == 0
        bag = bags.bag_index[negative]
        # by patient: slides of one patient are in one fold, and are not compared with each other
        reference = ConformalReference.build(scores[negative], fold[bag], groups[bag], n_folds)
        logger.info("smallest possible p-value of a patch: %.2g", reference.smallest())
        shown = np.broadcast_to(scores, (n_folds, len(scores)))
        own_fold, own_bag = fold[bags.bag_index], groups[bags.bag_index]
        own = p_values(reference, shown, own_fold=own_fold, own_bag=own_bag)[~negative]
        ranks = p_values(reference, shown, own_fold=own_fold, own_bag=np.full(len(scores), -1))
        taught = calibrated and getattr(model, "instance_labels", "ignore") == "use"
        return cls(
            models,
            labels,
            groups,
            fold,
            bags.digests(),
            odds,
            reference,
            SlideCalibrator.fit(odds, labels) if calibrated else None,
            _unlike(own, same_kind(models[0], bags, ranks, ~negative)),
            of_patches(scores, bags.instance_labels, ~negative) if taught else None,
        )

    def probability(self) -> Float[np.ndarray, " B"]:
        """Calibrated P(y = 1) out of fold: the calibration, too, has not seen the fold."""
        p = np.empty(len(self.labels))
        folds = range(int(self.fold.max()) + 1)
        fewest = min(np.bincount(self.labels[self.fold != k], minlength=2).min() for k in folds)
        if fewest < NEEDED:
            raise ValueError(
                f"a rule needs at least {NEEDED} bags of each class outside every fold "
                f"of the cohort, found {fewest}: fit with calibrated=True on more bags."
            )
        for k in folds:
            inside = self.fold == k
            others = SlideCalibrator.fit(self.log_odds[~inside], self.labels[~inside])
            p[inside] = others.predict(self.log_odds[inside])
        return p

    def held_out(self) -> Float[np.ndarray, " B"]:
        """P(y = 1) out of fold: calibrated where the model is and enough bags are there."""
        fewest = [np.bincount(self.labels[self.fold != k], minlength=2).min() for k in self.fold]
        if self.calibrator is not None and min(fewest) >= NEEDED:
            return self.probability()
        return expit(self.log_odds)

    def p_values(self, bags: Bags, weights: str) -> Float[np.ndarray, " N"]:
        """Conformal p-values; a bag of the training cohort only meets the model without it."""
        scores = np.stack([suspicion(m._instances(bags)) for m in self.models])
        p = p_values(self.reference, scores, weights=weights)
        known, own = self._own(bags)
        rows = known[bags.bag_index]
        if rows.any():
            bag = own[bags.bag_index[rows]]
            p[rows] = p_values(
                self.reference,
                scores[:, rows],
                weights=weights,
                own_fold=self.fold[bag],
                own_bag=self.groups[bag],
            )
        return p

    def marked(self, found: InstancePredictions, marks: Marks) -> InstancePredictions:
        """With p-values and marks."""
        p = self.p_values(found.bags, marks.weights)
        slides = found.bags.bag_index if marks.within == "bag" else None
        return replace(found, p_value=p, flagged=benjamini_hochberg(p, marks.rate, slides))

    def in_bags(
        self,
        found: InstancePredictions,
        implied: Float[np.ndarray, " B"],
        said: Float[np.ndarray, " B"],
    ) -> InstancePredictions:
        """Patches beside their bags: P(y = 1) as the patches imply it, and as it is said.

        Calibrated P(h = 1), where patches were labelled; P(unlike negative slides), where it is
        offered: that in a positive bag, times P(y = 1).
        """
        if self.patches is not None:
            of = found.bags.bag_index
            p = self.patches.in_slides(suspicion(found), implied[of], said[of])
            found = replace(found, probability=p)
        if found.p_value is None or self.unlike is None or not self.unlike.supported:
            return found
        within = self.unlike.probability(found.p_value)
        return replace(found, unlike=within * said[found.bags.bag_index])

    def _own(self, bags: Bags) -> tuple[Bool[np.ndarray, " b"], Int[np.ndarray, " b"]]:
        """Which bags were in the training cohort, and where."""
        order = np.argsort(self.fingerprints, kind="stable")
        ordered, found = self.fingerprints[order], bags.digests()
        place = np.minimum(np.searchsorted(ordered, found), len(ordered) - 1)
        return ordered[place] == found, order[place]

    def arrays(self) -> dict[str, np.ndarray]:
        """What is saved of it, but for the models."""
        own = {f"cross_fit.{name}": getattr(self, name) for name in ARRAYS}
        own |= {f"reference.{k}": v for k, v in vars(self.reference).items()}
        unlike = {} if self.unlike is None else vars(self.unlike)
        if self.patches is not None:
            own["patches.numbers"] = np.array([self.patches.intercept, self.patches.slope])
        return own | {f"unlike.{k}": v for k, v in unlike.items()}


def _numbered(bags: Bags) -> Int[np.ndarray, " B"]:
    """Patients as numbers; every bag its own where none were given."""
    if bags.groups is None:
        return np.arange(len(bags))
    return np.unique(bags.groups, return_inverse=True)[1]


def restore(
    models: list[Any], arrays: dict[str, np.ndarray], calibrator: SlideCalibrator | None
) -> CrossFit:
    """From what `CrossFit.arrays` saved, and the calibrator."""
    own = {name: arrays[f"reference.{name}"] for name in ("scores", "offsets", "bag")}
    odd = {k.removeprefix("unlike."): v for k, v in arrays.items() if k.startswith("unlike.")}
    patches = arrays.get("patches.numbers")
    return CrossFit(
        models,
        **{name: arrays[f"cross_fit.{name}"] for name in ARRAYS},
        reference=ConformalReference(**own),
        calibrator=calibrator,
        unlike=Unlike(**odd) if odd else None,
        patches=None if patches is None else PatchCalibrator(*patches.tolist()),
    )


def _unlike(p: Float[np.ndarray, " n"], same_kind: float) -> Unlike | None:
    """From the p-values of positive bags, where there are enough."""
    if len(p) < NEEDED_PATCHES:
        return None
    found = Unlike.fit(p, same_kind)
    logger.info("%s", found)
    return found


def suspicion(found: InstancePredictions) -> Float[np.ndarray, " N"]:
    """The score that patches are compared by: m*/sd, which is P(h = 1) without its rounding."""
    return found.mean / found.std
