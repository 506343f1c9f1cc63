"""How near to Bayes the coupling can come on shifted means, whatever is learned.

The one feature that tells is given. f is any smooth function of it (a line and eleven bumps, fitted
by the likelihood of training bags), m = Sigma f with Sigma = (I + lambda C)^-1 on the chain, and
the bag is positive where any m + noise is: the best that a coupling by Sigma allows.

    python benchmarks/coupling_limit.py        # some ten seconds
"""

import numpy as np
import torch
from sklearn.metrics import log_loss, roc_auc_score

from gpmil.proof import shifted_mean

LONGEST = shifted_mean.LONGEST
BUMPS = torch.linspace(-4, 6, 11, dtype=torch.double)
TRAIN, TEST = 3000, 4000  # bags


class Chains:
    """Bags padded to one length: features of f, the graph, and which instances are there."""

    def __init__(self, n_bags: int, seed: int) -> None:
        self.bags = shifted_mean.draw(n_bags, 1, (seed,))
        x = torch.zeros(n_bags, LONGEST, dtype=torch.double)
        self.there = torch.zeros_like(x)
        for b, own in enumerate(self.bags.split(self.bags.features[:, 0])):
            x[b, : len(own)] = torch.from_numpy(own.astype(float))
            self.there[b, : len(own)] = 1
        A = torch.diag_embed(self.there[:, 1:] * self.there[:, :-1], offset=1)
        A = A + A.mT
        self.C = torch.diag_embed(A.sum(2)) - A
        self.y = torch.tensor(self.bags.labels)
        bumps = torch.exp(-((x[..., None] - BUMPS) ** 2) / 2)
        self.basis = torch.cat([torch.ones_like(x)[..., None], x[..., None], bumps], -1)

    def smoothed(self, coupling: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Sigma times the basis of f, and the deviations of m."""
        Sigma = torch.linalg.inv(torch.eye(LONGEST, dtype=torch.double) + coupling * self.C)
        return Sigma @ self.basis, torch.diagonal(Sigma, dim1=1, dim2=2).sqrt()


def log_negative(chains: Chains, smoothed: tuple[torch.Tensor, torch.Tensor], a: torch.Tensor):
    """log P(y = 0) = sum_i log Phi(-m_i / sigma_i), f = basis @ a."""
    P, sigma = smoothed
    return (torch.special.log_ndtr(-(P @ a) / sigma) * chains.there).sum(1)


def best_f(train: Chains, smoothed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The coefficients of f with the highest likelihood of the training bags."""
    a = torch.zeros(2 + len(BUMPS), dtype=torch.double)
    a[:2] = torch.tensor([-4.0, 2.0])
    a.requires_grad_()
    climb = torch.optim.LBFGS([a], max_iter=150, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        climb.zero_grad()
        q = log_negative(train, smoothed, a).clamp(max=-1e-9)
        value = -torch.where(train.y == 1, torch.log(-torch.expm1(q)), q).mean()
        value = value + 1e-4 * (a**2).mean()
        value.backward()
        return value

    climb.step(loss)
    return a.detach()


def main() -> None:
    """AUC and log loss of fresh bags for several lambda, below Bayes on the same bags."""
    train, test = Chains(TRAIN, 5), Chains(TEST, 6)
    odds = shifted_mean.bayes_log_odds(test.bags)
    bayes = roc_auc_score(test.y, odds), log_loss(test.y, 1 / (1 + np.exp(-odds)))
    print(f"{'Bayes':12s} AUC {bayes[0]:.3f}  log loss {bayes[1]:.3f}")
    for coupling in (0.3, 0.6, 1.0, 1.5, 2.5):
        a = best_f(train, train.smoothed(coupling))
        q = log_negative(test, test.smoothed(coupling), a).numpy()
        auc, loss = roc_auc_score(test.y, -q), log_loss(test.y, np.clip(-np.expm1(q), 1e-9, 1))
        print(
            f"lambda {coupling:<5g} AUC {auc:.3f}  log loss {loss:.3f}  "
            f"(Bayes {auc - bayes[0]:+.3f}, {loss - bayes[1]:+.3f})"
        )


if __name__ == "__main__":
    main()
