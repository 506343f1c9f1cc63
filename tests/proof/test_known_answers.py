"""Known answers: the bags that are drawn, the rule that is kept, the best classifier."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import multivariate_normal
from sklearn.metrics import log_loss, roc_auc_score

import gpmil
from gpmil.models import AllConceptsMIL, ScreenedMIL
from gpmil.models.screened import column_p_values, screened_columns
from gpmil.proof import algorithmic, shifted_mean, torchmil_models

# "what is unlike anything known is positive": the mean that learning finds on the first test
HIGH = {"variance": 9.0, "lengthscale": 1.7, "mean": 6.0, "n_inducing": 60, "device": "cpu"}
LOW = {"variance": 9.0, "lengthscale": 4.0, "mean": -3.0, "n_inducing": 40, "device": "cpu"}


def auc(model, bags):
    return roc_auc_score(bags.labels, model.decision_function(bags))


def both(test, n_bags=80, seed=0):
    return algorithmic.draw(test, n_bags, seed), algorithmic.draw(test, n_bags, seed, moved=True)


# --- What is drawn --------------------------------------------------------------------------------
def poisoned(bags):
    return np.array([(x.mean(axis=1) < -5).sum() for x in bags.split(bags.features)])


def near(bags, mean):
    return np.array([(np.abs(x - mean) < 1).all(1).sum() for x in bags.split(bags.features)])


@pytest.mark.parametrize("test", [1, 2, 3])
def test_bags_are_drawn_as_the_paper_says(test):
    train, moved = both(test, 400)
    y = train.labels == 1
    if test == 1:
        assert (poisoned(train) == ~y).all() and (poisoned(moved) == y).all()
        assert {train.sizes[~y].min(), train.sizes[~y].max()} == {2, 10}
        assert train.sizes[y].max() == 7
    if test == 2:
        assert (poisoned(train)[~y] == 1).all() and 0.02 < poisoned(train)[y].mean() < 0.2
        assert (poisoned(moved) == y).all()
        a, b = near(train, 2.0), near(train, 3.0)
        assert ((a + b)[~y] == 1).all() and (np.minimum(a, b)[y] >= 1).all() and a.max() == 4
    if test == 3:
        a, b = near(train, -2.0), near(train, 2.0)
        assert ((a + b)[~y] == 1).all() and (a[y] == 1).all() and (b[y] == 1).all()
        copies = (near(moved, -2.0) + near(moved, 2.0))[~y]
        assert (copies.min(), copies.max()) == (35, 39)


# --- Who keeps the rule ---------------------------------------------------------------------------
@pytest.mark.parametrize(("test", "settings"), [(1, HIGH), (2, LOW)])
def test_the_rule_is_kept_where_the_shortcut_is_turned_round(test, settings):
    train, moved = both(test, 120)
    model = gpmil.VGPMILPR(**settings, random_state=0).fit(train)
    assert auc(model, train) > 0.99 and auc(model, moved) > 0.97
    shortcut = gpmil.MeanPoolMIL(max_epochs=10, learning_rate=1e-3, random_state=0).fit(train)
    assert auc(shortcut, train) > 0.95 and auc(shortcut, moved) < 0.6


def test_a_mean_far_below_zero_finds_no_outlier_and_bags_left_out_say_so():
    # why learned settings keep the rule: what is far from all known patches falls back to the mean
    train, moved = both(1, 120)
    low, high = (
        gpmil.VGPMILPR(**HIGH | {"mean": mean}, random_state=0).fit(train) for mean in (-6.0, 6.0)
    )
    assert auc(low, moved) < 0.7 < 0.97 < auc(high, moved)
    assert low.leave_one_bag_out(train).mean() < high.leave_one_bag_out(train).mean() - 0.3


def fitted_models():
    train = algorithmic.draw(2, 40, seed=1)
    rule = gpmil.VGPMILPR(**LOW | {"n_inducing": 20}, random_state=0)
    return {
        "pr": rule.fit(train),
        "effect": gpmil.VGPMILPR(**rule.get_params() | {"slide_effect": 1.0}).fit(train),
        "vgpmil": gpmil.VGPMIL(**gpmil.paper_settings("VGPMIL") | {"n_inducing": 20}).fit(train),
        "max": gpmil.MaxPoolMIL(max_epochs=5, random_state=0).fit(train),
        "concepts": AllConceptsMIL(model=rule, random_state=0).fit(train),
    }


@pytest.fixture(scope="module")
def monotone():
    return fitted_models()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0.1, 12))
def test_another_instance_never_makes_a_bag_less_positive(monotone, seed, n, spread):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, spread, (n + 1, 16))
    bags = gpmil.Bags.from_arrays([x[:n], x])
    for name, model in monotone.items():
        log_p, error = model.log_proba_negative(bags)
        # an instance that is all but surely negative may leave it as it was, rounding apart
        assert log_p[1] <= log_p[0] + error.max() + 1e-6 + 1e-6 * abs(log_p[0]), name


# --- A and B --------------------------------------------------------------------------------------
def test_two_concepts_are_found_where_the_rule_cannot_say_it():
    train, moved = both(3)
    one = gpmil.VGPMILPR(**LOW, random_state=0)
    two = AllConceptsMIL(model=one, random_state=0).fit(train)
    assert auc(two, train) > 0.99 and auc(two, moved) > 0.99
    assert auc(one.fit(train), moved) < 0.9
    # P(y = 1) is the product of the concepts' own
    own = [model.predict_proba(moved)[:, 1] for model in two.models_]
    np.testing.assert_allclose(two.predict_proba(moved)[:, 1], own[0] * own[1], rtol=1e-9)
    assert len(two.predict_concepts(moved)) == 2


def test_negative_bags_find_the_concept_they_lack(monkeypatch):
    train, moved = both(3)
    right = AllConceptsMIL._first_guess
    rng = np.random.default_rng(0)

    def wrong(self, bags, labels):
        guess = right(self, bags, labels)
        turned = (guess >= 0) & (rng.random(len(guess)) < 0.3)
        return np.where(turned, 1 - guess, guess)

    model = AllConceptsMIL(model=gpmil.VGPMILPR(**LOW, random_state=0), random_state=0)
    truth = model.fit(train).lacking_
    monkeypatch.setattr(AllConceptsMIL, "_first_guess", wrong)
    again = model.fit(train)
    assert again.n_rounds_ > 1 and (again.lacking_ == truth).mean() > 0.97
    assert auc(again, moved) > 0.99


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_concepts": 1}, "n_concepts"),
        ({"model": gpmil.MeanPoolMIL()}, "leave them out"),
        ({"n_concepts": 30}, "60 negative bags"),
    ],
)
def test_concepts_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AllConceptsMIL(**settings).fit(algorithmic.draw(3, 20, seed=0))


# --- Shifted means --------------------------------------------------------------------------------
def test_bayes_has_the_published_auc_and_log_loss():
    bags = shifted_mean.draw(8_000, 1, seed=(1,))
    odds = shifted_mean.bayes_log_odds(bags)
    assert roc_auc_score(bags.labels, odds) == pytest.approx(0.949, abs=0.005)
    assert log_loss(bags.labels, expit(odds)) == pytest.approx(0.287, abs=0.012)


def test_bayes_is_the_ratio_of_densities():
    bags = shifted_mean.draw(4, 3, seed=(2,), delta=1.3)
    for x, odds in zip(bags.split(bags.features), shifted_mean.bayes_log_odds(bags, 1.3)):
        n = len(x)
        places = [1.3 * ((np.arange(n) >= i) & (np.arange(n) < i + 3)) for i in range(n - 2)]
        density = [multivariate_normal.logpdf(x[:, 0], mean) for mean in (*places, np.zeros(n))]
        shifted = np.logaddexp.reduce(density[:-1]) - np.log(n - 2)
        assert odds == pytest.approx(shifted - density[-1], rel=1e-9)


def test_screening_finds_the_one_feature_in_768():
    bags = shifted_mean.draw(120, 768, seed=(3,))
    model = ScreenedMIL(gpmil.MeanPoolMIL(max_epochs=1, random_state=0)).fit(bags)
    assert 0 in model.columns_ and len(model.columns_) < 20
    inner = model.model_.predict_proba(bags.with_features(bags.features[:, model.columns_]))
    assert (model.predict_proba(bags) == inner).all()
    assert (model.predict_all(bags).proba == inner).all()


def test_p_values_of_columns_are_welchs():
    from scipy.stats import ttest_ind

    bags = shifted_mean.draw(30, 5, seed=(4,))
    x = bags.features.astype(float) - bags.features.astype(float).mean(0)
    for column, found in enumerate(column_p_values(bags, bags.labels)):
        of = bags.split(x[:, column])
        tests = [
            ttest_ind(*([f(v) for v, y in zip(of, bags.labels) if y == k] for k in (0, 1)),
                      equal_var=False).pvalue
            for f in (np.mean, lambda v: np.mean(v**2))
        ]  # fmt: skip
        assert found == pytest.approx(min(1, 2 * min(tests)), rel=1e-9)


def test_where_no_column_differs_all_are_kept():
    rng = np.random.default_rng(0)
    bags = gpmil.Bags.from_arrays(rng.normal(size=(20, 3, 6)), labels=np.arange(20) % 2)
    model = ScreenedMIL(gpmil.MeanPoolMIL(max_epochs=1), rate=1e-6).fit(bags)
    assert model.columns_.tolist() == list(range(6))
    with pytest.raises(ValueError, match="needs a model of bags"):
        ScreenedMIL().fit(bags)


def test_means_of_neighbours_are_columns_too():
    bags = shifted_mean.draw(60, 3, seed=(6,))
    model = ScreenedMIL(gpmil.MeanPoolMIL(max_epochs=1), neighbours=True).fit(bags)
    # the shifted ones are neighbours: the mean of neighbours tells as much as the feature
    assert 3 in model.columns_ and len(model.p_values_) == 6
    naive = [
        np.stack([x[[j for j in (i - 1, i + 1) if 0 <= j < len(x)]].mean(0) for i in range(len(x))])
        for x in bags.split(bags.features.astype(float))
    ]
    wide = np.hstack([bags.features, np.concatenate(naive)])
    assert np.allclose(screened_columns(bags, np.arange(6)), wide, atol=1e-5)
    alone = gpmil.Bags.from_arrays(
        [np.ones((1, 3)), np.zeros((1, 3))], labels=[0, 1], graph="chain"
    )
    assert (screened_columns(alone, np.array([4])) == [[1.0], [0.0]]).all()
    with pytest.raises(ValueError, match="no instance of these bags has neighbours"):
        ScreenedMIL(gpmil.MeanPoolMIL(), neighbours=True).fit(alone)
    with pytest.raises(ValueError, match="one row per instance"):
        bags.with_features(bags.features[1:])


def test_there_may_be_any_number_of_lengths():
    bags = shifted_mean.draw(24, 300, seed=(7,))
    few = {"n_inducing": 6, "tuning_budget": 4, "device": "cpu", "random_state": 0}
    model = gpmil.VGPMILPR(lengthscale="ard", **few).fit(bags)
    assert model.relevance_.shape == (300,) and (model.relevance_ > 0).all()


def test_screened_instances_are_of_the_bags_that_were_given():
    bags = shifted_mean.draw(40, 4, seed=(5,))
    model = ScreenedMIL(gpmil.VGPMILPR(**LOW | {"n_inducing": 10}, random_state=0)).fit(bags)
    assert model.predict_instances(bags).bags is bags
    assert model.predict_all(bags).instances.bags is bags


# --- Networks of others ---------------------------------------------------------------------------
@pytest.mark.skipif(not torchmil_models.installed(), reason="torchmil is not installed")
def test_a_network_of_torchmil_takes_the_shortcut():
    train, moved = both(1, 40)
    model = torchmil_models.TorchmilModel(network="ABMIL", max_epochs=12).fit(train)
    assert auc(model, train) > 0.9 and auc(model, moved) < 0.5
    model = torchmil_models.TorchmilModel(network="ABMIL", max_epochs=1, n_components=3).fit(train)
    assert model.predict_proba(moved).shape == (40, 2)
