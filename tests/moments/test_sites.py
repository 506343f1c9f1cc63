"""The one loop of EP, given a Gaussian step."""

import torch
from oracles.orthant import slide

from gpmil.moments.ep import ep
from gpmil.moments.sites import Gauss, first_sites, fixed_point, pick


def problem():
    """Three bags that need different numbers of iterations; the last has its diagonal only."""
    bags = [slide(3, 4, coupling, seed=8) for coupling in (0.5, 10.0, 1.0)]
    mu = torch.stack([torch.from_numpy(m) for m, _ in bags])
    cov = torch.stack([torch.from_numpy(S) for _, S in bags])
    cov[2] = torch.diag(cov[2].diagonal())
    return mu, cov


def inverting(mu, cov):
    """A Gaussian step as one would first write it."""

    def step(sites):
        precision = torch.linalg.inv(cov)
        V = torch.linalg.inv(precision + torch.diag_embed(sites.tau))
        mean = (V @ (precision @ mu[..., None] + sites.nu[..., None]))[..., 0]
        var = V.diagonal(dim1=-2, dim2=-1)
        return Gauss(mean, var, 1 - sites.tau * var, torch.zeros(len(mu)).double())

    return step


def start(mu, cov):
    variance = cov.diagonal(dim1=-2, dim2=-1)
    inside = torch.ones_like(mu, dtype=torch.bool)
    return first_sites(mu, variance, inside), variance, inside


def test_any_gaussian_step_leads_to_the_sites_of_ep():
    mu, cov = problem()
    found = fixed_point(inverting(mu, cov), *start(mu, cov), tol=1e-10)
    expected = ep(mu, cov, tol=1e-10)
    assert bool(found.converged.all())
    for ours, theirs in zip((*found.sites, found.gauss.mean), (*expected[:2], expected.mean)):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_bags_leave_as_they_converge():
    mu, cov = problem()
    left, alone = [], []

    def step(sites):
        return inverting(*state)(sites)

    def leave(reached):
        nonlocal state
        left.append(pick(reached.converged, reached))
        state = pick(~reached.converged, state)

    state = (mu, cov)
    last = fixed_point(step, *start(mu, cov), tol=1e-8, leave=leave)
    assert [len(one.converged) for one in (*left, last)] == [1, 1, 1]
    for b in range(3):
        one = (mu[b : b + 1], cov[b : b + 1])
        alone.append(fixed_point(inverting(*one), *start(*one), tol=1e-8))
    alone.sort(key=lambda one: one.n_iter)
    for found, expected in zip((*left, last), alone):
        assert found.n_iter == expected.n_iter
        torch.testing.assert_close(found.sites.tau, expected.sites.tau, rtol=1e-9, atol=1e-12)


def test_precisions_stay_above_the_floor_and_iterations_may_run_out():
    mu, cov = problem()
    taus = []

    def step(sites):
        taus.append(sites.tau * cov.diagonal(dim1=-2, dim2=-1))
        return inverting(mu, cov)(sites)

    found = fixed_point(step, *start(mu - 4, cov), tol=0.0, max_iter=5, floor=0.3)
    assert len(taus) == found.n_iter == 5 and not found.converged.any()
    assert min(float(tau.min()) for tau in taus) >= 0.3 - 1e-12
    assert max(float((tau < 0.3 + 1e-12).sum()) for tau in taus) > 0
