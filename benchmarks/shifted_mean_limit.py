"""What can be known of shifted means from 1,000 bags, and what the multiple-instance rule can say.

The same bags as in `gpmil proof --only shifted-mean`, 16 features. Below Bayes in AUC and above it
in log loss, on the same test bags, are

* the true family: which feature, and how large the shift is, by maximum likelihood;
* the rule, any f: the feature is given, f is any smooth function of an instance and of the mean of
  its neighbours (powers up to the second and 36 bumps), and a bag is positive where any f + noise
  is above 0. f is learned from 20,000 bags: the best that the rule allows. And from the 1,000;
* our models, with columns screened and the means of neighbours beside them.

At the end that limit on 40,000 other bags, and how much test sets of a proof scatter about it.

    python benchmarks/shifted_mean_limit.py [--seeds 3]        # half a minute each
"""

import argparse

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit
from sklearn.metrics import log_loss, roc_auc_score

from gpmil.models.screened import screened_columns
from gpmil.proof import bayes_distance, methods, shifted_mean

FEATURES, TRAIN, TEST, MANY = 16, 1000, 4000, 20_000
OURS = ("uncoupled-beside", "screened-beside")
GRID = np.stack(np.meshgrid(np.linspace(-2, 4, 6), np.linspace(-1.5, 3.5, 6)), -1).reshape(-1, 2)
WIDTH, START = 1.2, (-4.0, 1.0, 2.0)  # of bumps; of f, in 1, x and the mean of neighbours
RIDGE = {MANY: 0.01, TRAIN: 0.3}


class Rule:
    """The multiple-instance rule, with f learned by the likelihood of bags."""

    def __init__(self, bags):
        self.P, self.bag, n = *basis(bags), len(bags)
        y, start = torch.tensor(bags.labels), torch.zeros(self.P.shape[1], dtype=torch.double)
        start[: len(START)] = torch.tensor(START)
        self.a = start.clone().requires_grad_()
        climb = torch.optim.LBFGS([self.a], max_iter=400, line_search_fn="strong_wolfe")

        def loss():
            climb.zero_grad()
            q = self.log_negative(self.P, self.bag, n).clamp(max=-1e-9)
            value = -torch.where(y == 1, torch.log(-torch.expm1(q)), q).sum()
            value = (value + RIDGE[n] * ((self.a - start) ** 2).sum()) / n
            value.backward()
            return value

        climb.step(loss)

    def log_negative(self, P, bag, n):
        """log P(y = 0) = sum_i log Phi(-f_i)."""
        each = torch.special.log_ndtr(-(P @ self.a))
        return torch.zeros(n, dtype=torch.double).index_add(0, bag, each)

    def log_odds(self, bags):
        """log P(y = 1) - log P(y = 0)."""
        with torch.no_grad():
            q = self.log_negative(*basis(bags), len(bags)).clamp(max=-1e-9)
        return (torch.log(-torch.expm1(q)) - q).numpy()


def basis(bags):
    """Powers and bumps of (x, mean of neighbours), and the bag of every row."""
    F = screened_columns(bags, np.array([0, bags.n_features])).astype(float)
    bumps = np.exp(-((F[:, None] - GRID) ** 2).sum(-1) / (2 * WIDTH**2))
    powers = [np.ones((len(F), 1)), F, F**2 / 10, F.prod(1, keepdims=True) / 10]
    return torch.tensor(np.hstack([*powers, bumps])), torch.tensor(bags.bag_index)


def true_family(train, test):
    """Log odds of test bags at the feature and shift that are likeliest in training."""

    def loss(delta, column):
        odds = shifted_mean.bayes_log_odds(of(train, column), delta)
        return log_loss(train.labels, expit(odds))

    def of(bags, column):
        return bags.with_features(bags.features[:, [column]])

    found = {
        column: minimize_scalar(loss, bounds=(0.01, 4), args=(column,), method="bounded")
        for column in range(FEATURES)
    }
    best = min(found, key=lambda column: found[column].fun)
    print(f"likeliest: feature {best}, shift {found[best].x:.2f}")
    return shifted_mean.bayes_log_odds(of(test, best), found[best].x)


def away(test, odds, among=slice(None)):
    """AUC below that of Bayes and log loss above it, on some of the bags."""
    y, best, own = (v[among] for v in (test.labels, shifted_mean.bayes_log_odds(test), odds))
    below = roc_auc_score(y, best) - roc_auc_score(y, own)
    return np.array([below, log_loss(y, expit(own)) - log_loss(y, expit(best))])


def ours(train, test, seed):
    """Log odds of our models, by name."""
    for method in methods.on_chains():
        if method.key in OURS:
            yield method.name, logit(method.make(seed).fit(train).predict_proba(test)[:, 1])


def main() -> None:
    """Seeds as the proof has them, and means over them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    limit, found = Rule(shifted_mean.draw(MANY, 1, (99,))), {}
    for seed in range(parser.parse_args().seeds):
        train, test = bayes_distance.drawn(FEATURES, TRAIN, TEST, seed).draw()
        odds = {
            "the true family": true_family(train, test),
            f"the rule, any f, {MANY:,} bags": limit.log_odds(test),
            f"the rule, any f, {TRAIN:,} bags": Rule(train).log_odds(test),
            **dict(ours(train, test, seed)),
        }
        print(f"seed {seed}:", flush=True)
        for name, own in odds.items():
            found.setdefault(name, []).append(away(test, own))
            print(f"  {name:46s} {'{:.4f}, {:.4f}'.format(*found[name][-1])}")
    for name, each in found.items():
        print(f"{name:48s} {'{:.4f}, {:.4f}'.format(*np.mean(each, 0))}")
    other = shifted_mean.draw(2 * MANY, 1, (7,))
    odds = limit.log_odds(other)
    print("the rule, {:,} other bags: {:.4f}, {:.4f}".format(len(other), *away(other, odds)))
    for n in bayes_distance.TEST_BAGS.values():
        sets = [away(other, odds, slice(k, k + n)) for k in range(0, len(other), n)]
        print(f"  deviation of {n:,} bags: " + "{:.4f}, {:.4f}".format(*np.std(sets, 0, ddof=1)))


if __name__ == "__main__":
    main()
