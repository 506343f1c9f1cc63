"""The simulator: reproducible, exact in its counts, and true to what its docstrings say."""

import inspect
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.sparse.csgraph import connected_components
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from gpmil.simulate import Settings, cohort, panda_like, population, sicapv2_like, slide, stream
from gpmil.simulate.cohorts import draw_roster


@pytest.fixture(scope="module")
def bags():
    return cohort(150, n_positive=90, seed=4)


def pieces(bag, of=None):
    """Connected pieces of a bag's graph (or of the patches `of`): number, sizes."""
    graph = bag.adjacency if of is None else bag.adjacency[of][:, of]
    count, piece = connected_components(graph, directed=False)
    return count, np.bincount(piece)


def holes(bag):
    """Background cells that no 8-neighbour path connects to the outside, as components."""
    cells = np.round((bag.coords - bag.coords.min(0)) / 1024).astype(int)
    empty = np.ones(cells.max(0) + 3, dtype=bool)
    empty[tuple(cells.T + 1)] = False
    return ndimage.label(empty, np.ones((3, 3)))[1] - 1


# ------------------------------------------------------------------------- reproducible
def same(a, b):
    return (
        np.array_equal(a.features, b.features)
        and np.array_equal(a.coords, b.coords)
        and np.array_equal(a.instance_labels, b.instance_labels)
        and list(a.names) == list(b.names)
        and list(a.groups) == list(b.groups)
    )


def test_same_seed_same_bits_and_another_seed_or_part_others():
    first = cohort(5, seed=3)
    assert same(first, cohort(5, seed=3))
    for other in (cohort(5, seed=2), cohort(5, seed=3, part=1)):
        assert first.features.shape != other.features.shape
        assert not set(first.features.ravel()[:50]) & set(other.features.ravel()[:50]) - {0.0}
    assert not set(first.groups) & set(cohort(5, seed=3, part=1).groups)


def test_a_slide_does_not_depend_on_the_size_of_the_cohort():
    small, large = cohort(8, seed=6), cohort(21, seed=6)
    kept = [i for i in range(8) if small.labels[i] == large.labels[i]]
    assert len(kept) >= 5
    assert list(small.groups) == list(large.groups[:8])
    for i in kept:
        assert same(small[i], large[i])


def test_the_stream_is_the_cohort_in_pieces():
    whole, parts = cohort(7, n_positive=3, seed=9), list(stream(7, 3, seed=9, chunk=3))
    assert [len(part) for part in parts] == [3, 3, 1]
    assert np.array_equal(np.concatenate([part.features for part in parts]), whole.features)
    assert np.array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


def test_the_lesion_is_all_that_differs_between_a_slide_and_its_negative_twin():
    shared = population(seed=1)
    sick, well = (slide(np.random.SeedSequence(5), y, shared) for y in (1, 0))
    benign = sick.instance_labels == 0
    assert np.array_equal(sick.coords, well.coords)
    assert np.array_equal(sick.features[benign], well.features[benign])
    assert not (sick.features[~benign] == well.features[~benign]).all(axis=1).any()


def test_a_generator_gives_one_slide_after_another():
    rng, shared = np.random.default_rng(8), population(seed=1)
    assert slide(rng, 0, shared).features.shape != slide(rng, 0, shared).features.shape


# -------------------------------------------------------------------------------- counts
@pytest.mark.parametrize("n_bags, n_positive", [(1, 0), (1, 1), (5, 5), (7, 2), (20, 13)])
def test_exactly_as_many_positives_as_asked_for(n_bags, n_positive):
    bags = cohort(n_bags, n_positive, n_features=12, seed=2)
    assert (len(bags), bags.labels.sum()) == (n_bags, n_positive)
    assert bags.features.dtype == np.float32 and bags.features.shape[1] == 12


def test_half_is_positive_by_default():
    assert cohort(9, n_features=12).labels.sum() == 4


def test_sicapv2_like_has_the_numbers_of_the_experiment():
    train, test = sicapv2_like(seed=0)
    assert (len(train), train.labels.sum(), len(test), test.labels.sum()) == (95, 70, 31, 25)
    assert train.features.shape[1] == test.features.shape[1] == 128
    assert 13_000 < train.n_instances < 17_500 and 4_000 < test.n_instances < 6_500
    assert not set(train.groups) & set(test.groups)


def test_panda_like_has_the_numbers_of_panda():
    scale = 0.03
    sizes, labels = [], []
    for bags in panda_like(scale, seed=1, n_features=12):
        assert len(bags) <= 256
        sizes.extend(bags.sizes)
        labels.extend(bags.labels)
    assert len(sizes) == round(10_503 * scale) and sum(labels) == round(0.72 * len(sizes))
    # Standard error of the mean size: 105.5 / sqrt(4.4 x 315) = 2.8.
    assert np.mean(sizes) == pytest.approx(105.5, abs=9)


def test_patients_have_one_to_three_slides_and_some_have_both_classes():
    roster = draw_roster(seed=0, part=0, n_bags=1000, n_positive=700, settings=Settings())
    slides = np.bincount(roster.patients)
    assert set(slides) == {1, 2, 3} and 1.3 < slides.mean() < 1.5
    positive = np.bincount(roster.patients, roster.labels)
    mixed = ((positive > 0) & (positive < slides))[slides > 1].mean()
    pure_by_chance = 0.7**2 + 0.3**2
    assert 0.05 < mixed < 1 - pure_by_chance


# -------------------------------------------------------------------------------- tissue
def test_sizes_and_shapes_are_those_of_sicapv2(bags):
    assert 105 < np.median(bags.sizes) < 125 and 45 < bags.sizes.std() < 72
    assert bags.sizes.min() >= 15 and 220 < bags.sizes.max() < 600
    neighbours = bags.adjacency.sum() / bags.n_instances
    assert 2.95 < neighbours < 3.12
    assert 1.25 < np.mean([pieces(bag)[0] for bag in bags]) < 1.75
    longer = [1 + np.ptp(bag.coords, axis=0).max() / 1024 for bag in bags]
    assert 28 < np.median(longer) < 39


def test_holes_several_pieces_and_pieces_off_the_lattice_occur(bags):
    lattices = np.array([len(np.unique(bag.coords % 1024, axis=0)) for bag in bags])
    assert 0.08 < np.mean(lattices > 1) < 0.35 and lattices.max() == 2
    on_one = bags[lattices == 1]
    assert 0.05 < np.mean([holes(bag) > 0 for bag in on_one]) < 0.3
    assert 0.15 < np.mean([(pieces(bag)[1] >= 5).sum() > 1 for bag in bags]) < 0.5


def test_without_holes_and_with_one_core_the_options_are_obeyed():
    plain = cohort(12, n_features=12, holes=0.0, ragged=0.0, core_counts=(1.0,), mean_size=80)
    assert [pieces(bag)[0] for bag in plain] == [1] * 12
    assert sum(holes(bag) for bag in plain) == 0


def test_no_two_patches_overlap(bags):
    for bag in bags:
        x, y = bag.coords[None, :, :].T - bag.coords.T[:, None, :]
        overlap = (np.abs(x) < 1024) & (np.abs(y) < 1024)
        assert overlap.sum() == len(bag.coords)  # each with itself only


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    mean_size=st.floats(1, 400),
    core_width=st.floats(1, 9),
    ragged=st.floats(0, 3),
    max_lesion=st.floats(0.01, 1),
)
def test_any_sensible_settings_give_a_slide(seed, mean_size, core_width, ragged, max_lesion):
    shared = population(
        seed,
        Settings(
            n_features=5,
            n_latent=3,
            min_size=1,
            mean_size=mean_size,
            core_width=core_width,
            ragged=ragged,
            max_lesion=max_lesion,
            holes=1.0,
            second_lesion=1.0,
        ),
    )
    one = slide(seed, 1, shared)
    n = len(one.features)
    assert n >= 1 and np.isfinite(one.features).all()
    assert len(np.unique(one.coords, axis=0)) == n == len(one.instance_labels)
    assert 1 <= one.instance_labels.sum() <= max(1, max_lesion * n)


# ------------------------------------------------------------------------------- lesions
def test_patch_labels_agree_with_the_slide(bags):
    for bag in bags:
        malignant = bag.instance_labels.sum()
        assert (malignant > 0) == (bag.labels[0] == 1)
        assert malignant <= bag.n_instances / 2
        assert set(bag.instance_labels) <= {0, 1}


def test_a_single_lesion_is_connected_and_two_at_most_occur():
    single = cohort(40, 40, n_features=12, seed=5, second_lesion=0.0)
    assert {pieces(bag, bag.instance_labels == 1)[0] for bag in single} == {1}
    double = cohort(40, 40, n_features=12, seed=5, second_lesion=1.0)
    counts = [pieces(bag, bag.instance_labels == 1)[0] for bag in double]
    assert set(counts) == {1, 2} and np.mean(counts) > 1.4


def test_lesions_range_from_one_patch_to_half_the_slide():
    shared = population(0, Settings(n_features=12, mean_size=100, size_shape=1e4, second_lesion=0))
    drawn = [slide(seed, 1, shared).instance_labels for seed in range(300)]
    sizes, largest = np.array([y.sum() for y in drawn]), max(y.mean() for y in drawn)
    assert sizes.min() == 1 and 0.4 < largest <= 0.5
    # Log-uniform on 1 .. 50: about log 2 / log 51 = .18 are single patches, median about 7.
    assert 0.1 < np.mean(sizes == 1) < 0.26 and 4 <= np.median(sizes) <= 10


def test_labels_of_neighbours_agree_more_than_by_chance(bags):
    agree, chance = [], []
    for bag in bags[bags.labels == 1]:
        edges, share = bag.adjacency.tocoo(), bag.instance_labels.mean()
        y = bag.instance_labels
        agree.append(np.mean(y[edges.row] == y[edges.col]))
        chance.append(share**2 + (1 - share) ** 2)
    assert np.mean(agree) > np.mean(chance) + 0.08


# ------------------------------------------------------------------------------ features
def neighbour_correlation(bag):
    """Moran's I of a bag, averaged over the features by their variance."""
    x = bag.features - bag.features.mean(0)
    return (x * (bag.adjacency @ x)).sum() / bag.adjacency.sum() / (x**2).mean(0).sum()


def test_features_are_correlated_in_space_beyond_the_label(bags):
    negative = bags[bags.labels == 0]
    values = [neighbour_correlation(bag) for bag in negative]
    assert 0.15 < np.mean(values) < 0.4
    flat = cohort(12, 0, seed=4, texture=0.0, type_spread=0.0, mimic=0.0)
    assert np.mean([neighbour_correlation(bag) for bag in flat]) == pytest.approx(0, abs=0.03)


def between_slides(bags):
    """Share of the features' variance that lies between bags, less what chance would give."""
    means = np.stack([bag.features.mean(0) for bag in bags])
    within = sum(((bag.features - bag.features.mean(0)) ** 2).sum() for bag in bags)
    within /= bags.n_instances - len(bags)
    return 1 - within / (within + means.var(0, ddof=1).sum())


def test_slides_differ_by_their_stain(bags):
    negative = bags[bags.labels == 0]
    plain = cohort(60, 0, seed=4, stain=0.0)
    strong = cohort(60, 0, seed=4, stain=1.5)
    assert between_slides(plain) < between_slides(negative) < between_slides(strong)
    assert 0.04 < between_slides(negative) < 0.25


def test_slides_of_a_patient_share_part_of_the_stain():
    quiet = {"n_features": 24, "type_spread": 0.0, "mimic": 0.0, "texture": 0.0, "stain": 1.0}
    bags = cohort(300, 0, seed=2, **quiet)
    means = np.stack([bag.features.mean(0) for bag in bags])
    means -= means.mean(0)
    together = [i for i, (a, b) in enumerate(pairwise(bags.groups)) if a == b]
    apart = [i for i, (a, b) in enumerate(pairwise(bags.groups)) if a != b]
    products = (means[:-1] * means[1:]).sum(1) / (means**2).sum(1).mean()
    assert products[together].mean() == pytest.approx(Settings().patient_share, abs=0.15)
    assert abs(products[apart].mean()) < 0.1


def test_features_look_like_rectified_cnn_features(bags):
    assert bags.features.min() == 0 and 0.4 < np.mean(bags.features == 0) < 0.6
    assert np.all(bags.features.std(0) > 0.05)


def patch_auc(seed, **settings):
    """A logistic regression on true patch labels of 60 slides, judged on 60 other slides."""
    train, test = (cohort(60, seed=seed, part=part, **settings) for part in (0, 1))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500))
    model.fit(train.features, train.instance_labels)
    return roc_auc_score(test.instance_labels, model.decision_function(test.features))


def test_classes_overlap_as_documented():
    assert 0.93 < np.mean([patch_auc(seed) for seed in range(3)]) < 0.97


def test_separation_sets_the_difficulty():
    hard, easy = patch_auc(0, separation=1.5), patch_auc(0, separation=8.0)
    assert hard < 0.9 and easy > 0.985


def test_the_mimic_is_the_benign_type_nearest_to_cancer():
    shared = population(seed=7)
    along = shared.benign @ shared.cancer / (shared.cancer @ shared.cancer)
    assert along == pytest.approx([0, 0, 0, 0.5], abs=1e-12)
    assert shared.malignant @ shared.cancer == pytest.approx(np.full(3, 16.0))


def test_the_field_effect_moves_only_benign_patches_that_touch_the_lesion():
    shared = population(seed=3, settings=Settings(max_lesion=0.3))
    moved = replace(shared, settings=replace(shared.settings, field_effect=0.4))
    touched = 0
    for seed in range(6):
        a, b = slide(seed, 1, shared), slide(seed, 1, moved)
        distance = np.abs(a.coords[:, None] - a.coords[a.instance_labels == 1][None]).sum(2).min(1)
        assert np.array_equal((a.features != b.features).any(axis=1), distance == 1024)
        touched += (distance == 1024).sum()
    assert touched > 10


def test_lesions_have_the_fewest_patches_asked_for():
    one = {"second_lesion": 0.0, "core_counts": (1.0,), "seed": 4, "n_features": 12}
    small = cohort(30, 30, **one)
    large = cohort(30, 30, min_lesion=7, **one)
    counts = [np.add.reduceat(c.instance_labels, c.offsets[:-1]) for c in (small, large)]
    np.testing.assert_array_equal(small.coords, large.coords)
    assert counts[0].min() < 7 == counts[1].min() and (counts[1] <= large.sizes / 2).all()
    few = cohort(4, 4, min_lesion=500, **one)  # more than half of any slide
    found = np.add.reduceat(few.instance_labels, few.offsets[:-1])
    np.testing.assert_array_equal(found, few.sizes // 2)


# ------------------------------------------------------------------------------- defaults
def test_the_defaults_are_the_fixed_ones():
    # Changing a default changes every published number on simulated cohorts.
    assert Settings() == Settings(
        n_features=128,
        mean_size=121.0,
        size_shape=4.4,
        min_size=15,
        step=1024,
        core_width=3.15,
        core_counts=(0.75, 0.2, 0.05),
        off_lattice=0.75,
        ragged=0.4,
        holes=0.15,
        min_lesion=1,
        max_lesion=0.5,
        second_lesion=0.25,
        n_latent=12,
        decay=0.85,
        separation=4.0,
        mimic=0.5,
        type_spread=2.5,
        type_length=4.0,
        grain=1.0,
        texture=1.0,
        texture_length=2.0,
        stain=0.5,
        patient_share=0.5,
        noise=0.3,
        field_effect=0.0,
        patient_sizes=(0.7, 0.2, 0.1),
        patient_risk=0.8,
    )


def test_every_setting_is_documented():
    documented = inspect.getdoc(Settings).split("----------")[1]
    lines = [line for line in documented.splitlines() if line and not line.startswith(" ")]
    assert lines == list(Settings.__dataclass_fields__)


# ---------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"n_bags": 0}, "n_bags must be at least 1, got 0"),
        ({"n_bags": 4, "n_positive": 5}, "between 0 and n_bags = 4, got 5"),
        ({"n_bags": 4, "n_positive": -1}, "between 0 and n_bags = 4, got -1"),
        ({"n_bags": 4, "seed": -3}, "must not be negative, got seed=-3"),
        ({"n_bags": 4, "n_features": 6}, "n_latent = 12.*got n_features=6"),
        ({"n_bags": 4, "chunk": 0}, "chunk must be at least 1"),
        ({"n_bags": 4, "mean_size": 9.0}, "min_size=15, mean_size=9.0"),
        ({"n_bags": 4, "min_lesion": 0}, "min_lesion must be at least 1 patch, got 0"),
        ({"n_bags": 4, "max_lesion": 0.0}, r"max_lesion must lie in \(0, 1\]"),
        ({"n_bags": 4, "holes": 1.5}, r"holes must lie in \[0, 1\], got 1.5"),
        ({"n_bags": 4, "noise": -1.0}, "noise must not be negative"),
        ({"n_bags": 4, "separation": np.nan}, "separation must not be negative, got nan"),
        ({"n_bags": 4, "texture_length": 0.0}, "texture_length must be positive"),
        ({"n_bags": 4, "core_width": 0.5}, "core_width must be at least 1"),
        ({"n_bags": 4, "step": 2}, "step must be at least 4"),
        ({"n_bags": 4, "core_counts": (0.5, 0.4)}, "core_counts must be probabilities"),
    ],
)
def test_nonsense_is_refused_when_asked_for_and_not_when_drawn(arguments, message):
    with pytest.raises(ValueError, match=message):
        stream(**arguments)


def test_other_nonsense_is_refused_too():
    with pytest.raises(ValueError, match="scale must be positive, got 0"):
        panda_like(0)
    with pytest.raises(ValueError, match="label must be 0 or 1, got 2"):
        slide(0, 2, population(seed=0))
    with pytest.raises(TypeError, match="seperation"):
        cohort(4, seperation=2.0)
