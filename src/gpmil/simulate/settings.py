"""What can be set about simulated slides, checked, and the random streams of a cohort."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Number = float | int  # run-time type checks tell them apart; 2 is as good as 2.0

# Names of the random streams of one cohort seed (spawn keys, so that they never meet).
POPULATION, ROSTER, PATIENT, SLIDE, GRADES = range(5)


def generator(seed: int, *key: int) -> np.random.Generator:
    """The random stream of this name; streams of different names are independent."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set about a simulated slide; the defaults are the fixed ones.

    Matched to SICAPv2, there (here, with the defaults): patches per slide, mean 121 (121),
    median 118 (112), standard deviation 58 (60), largest of 155 slides 347 (about 320);
    connected pieces per slide, mean 1.54 (1.46); neighbours per patch, mean 3.04 (3.03); width of
    a core in patches, median 3.15 (3.17); length over width, median 5.2 (5.0); longer side of the
    slide in patches, median 33 (33); slides on more than one lattice 19 % (20 %); slides per
    patient, mean 1.6 (1.4). Of 128 CNN features of 30 slides: zeros 52 % (51 %); correlation of
    neighbours within negative slides .28 (.25), of their leading components .2 to .5 (.2 to .5);
    share of the variance between slides .07 to .11 (.10).

    Not matched, on purpose: holes, of which SICAPv2 has nearly none at this patch size, and the
    malignant share of a positive slide, log-uniform from one patch to one half (median 6 %;
    SICAPv2: 54 %), so that small lesions are common and positive slides hard to tell.

    `separation` was set so that a logistic regression trained on the true patch labels of 60
    slides reaches a patch AUC of .95 on 60 others (.93 to .96 over eight seeds).

    Attributes
    ----------
    n_features
        features per patch, D.
    mean_size
        mean number of patches per slide (gamma distributed).
    size_shape
        shape of that gamma distribution; standard deviation = mean / sqrt(shape).
    min_size
        smallest number of patches per slide; smaller draws are raised to it.
    step
        pixels between neighbouring patches at level 0.
    core_width
        mean width of a core in patches.
    core_counts
        probabilities of one, two, three, ... cores on a slide.
    off_lattice
        chance that the last of several cores starts its own lattice.
    ragged
        roughness of the outline in patches.
    holes
        chance that a core has a hole.
    min_lesion
        fewest malignant patches that a positive slide is drawn with; `max_lesion` goes first, and
        two lesions may share some.
    max_lesion
        largest share of a slide's patches that is malignant.
    second_lesion
        chance that the malignant patches are split over two lesions, which may meet.
    n_latent
        dimension of the space of appearances, embedded in the D features.
    decay
        ratio of the scales of successive latent dimensions in the features.
    separation
        distance of malignant from benign tissue along the common cancer direction.
        Sets the difficulty.
    mimic
        share of that distance at which the benign type that resembles cancer lies.
    type_spread
        distance of the tissue types from the centre of their class.
    type_length
        correlation length, in patches, of the fields that lay out the types.
    grain
        standard deviation of what differs from patch to patch, per latent dimension; the
        unit of all latent distances at its default.
    texture
        standard deviation of the spatially correlated part, per latent dimension.
    texture_length
        its correlation length in patches.
    stain
        standard deviation of the slide's shift, per latent dimension.
    patient_share
        share of the shift's variance that a patient's slides have in common.
    noise
        standard deviation of the white noise, per feature.
    field_effect
        share of the separation by which benign patches that touch a lesion are
        moved towards cancer. At 0 the benign patches of positive and negative slides have
        one distribution; above 0 they do not.
    patient_sizes
        probabilities of one, two, three, ... slides per patient.
    patient_risk
        share of the variance of a slide's risk that its patient explains. Slides
        with the highest risk are the positive ones, so most patients have slides of one
        class, and some have both.
    """

    n_features: int = 128
    mean_size: Number = 121.0
    size_shape: Number = 4.4
    min_size: int = 15
    step: int = 1024
    core_width: Number = 3.15
    core_counts: tuple[float, ...] = (0.75, 0.2, 0.05)
    off_lattice: Number = 0.75
    ragged: Number = 0.4
    holes: Number = 0.15
    min_lesion: int = 1
    max_lesion: Number = 0.5
    second_lesion: Number = 0.25
    n_latent: int = 12
    decay: Number = 0.85
    separation: Number = 4.0
    mimic: Number = 0.5
    type_spread: Number = 2.5
    type_length: Number = 4.0
    grain: Number = 1.0
    texture: Number = 1.0
    texture_length: Number = 2.0
    stain: Number = 0.5
    patient_share: Number = 0.5
    noise: Number = 0.3
    field_effect: Number = 0.0
    patient_sizes: tuple[float, ...] = (0.7, 0.2, 0.1)
    patient_risk: Number = 0.8

    def __post_init__(self) -> None:
        _check_settings(self)


# Which settings must have what, and how to say it.
_LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("core_width", lambda v: 1 <= v < np.inf, "be at least 1 patch"),
    ("step", lambda v: v >= 4, "be at least 4 pixels"),
    ("min_lesion", lambda v: v >= 1, "be at least 1 patch"),
    ("max_lesion", lambda v: 0 < v <= 1, "lie in (0, 1]"),
    (
        "off_lattice holes second_lesion mimic patient_share patient_risk",
        lambda v: 0 <= v <= 1,
        "lie in [0, 1]",
    ),
    ("size_shape type_length texture_length decay", lambda v: 0 < v < np.inf, "be positive"),
    (
        "ragged separation type_spread grain texture stain noise field_effect",
        lambda v: 0 <= v < np.inf,
        "not be negative",
    ),
)


def _check_settings(s: Settings) -> None:
    """Raise ValueError for settings that no slide could have."""
    if s.n_latent < 2 or s.n_features < s.n_latent:
        raise ValueError(
            f"n_features must be at least n_latent = {s.n_latent}, which must be at least 2; "
            f"got n_features={s.n_features}: raise it, or lower n_latent"
        )
    if s.min_size < 1 or not s.min_size <= s.mean_size < np.inf:
        raise ValueError(
            "expected 1 <= min_size <= mean_size, both in patches; "
            f"got min_size={s.min_size}, mean_size={s.mean_size}"
        )
    for names, holds, words in _LIMITS:
        for name in names.split():
            if not holds(getattr(s, name)):
                raise ValueError(f"{name} must {words}, got {getattr(s, name)}")
    for name in ("core_counts", "patient_sizes"):
        chances = np.asarray(getattr(s, name), dtype=float)
        if chances.size == 0 or not (chances >= 0).all() or abs(chances.sum() - 1) > 1e-8:
            raise ValueError(f"{name} must be probabilities that sum to 1, got {chances.tolist()}")
