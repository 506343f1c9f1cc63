import numpy as np
import pytest
import torch
from oracles.model import JITTER, coupling_matrix, kernel, relative_error
from synthetic import small_cohort

from gpmil.coupling.operator import Dense, Edges, dense_parts, parts
from gpmil.process.kernels import Kernel
from gpmil.process.sparse_gp import Posterior, Predictor, SparseGP, doubt, joint, marginal

NAMES = ["rbf", "matern32", "matern52", "linear"]


def draw(n, d=3, seed=0):
    return np.random.default_rng(seed).normal(size=(n, d))


@pytest.mark.parametrize("name", NAMES)
def test_whitening(name):
    x, z = draw(30), draw(6, seed=1)
    gp = SparseGP.build(Kernel(name, 2.0, 1.5), torch.from_numpy(z))
    W = gp.whiten(torch.from_numpy(x)).numpy()
    Kzz = kernel(z, z, name, 2.0, 1.5) + JITTER * 2.0 * np.eye(6)
    Kxz = kernel(x, z, name, 2.0, 1.5)
    # W W' = Kxz Kzz^-1 Kzx; a linear kernel of rank 3 leans on the jitter
    tolerance = 1e-9 if name == "linear" else 1e-11
    assert relative_error(W @ W.T, Kxz @ np.linalg.inv(Kzz) @ Kxz.T) < tolerance
    assert relative_error(gp.L @ gp.L.mT, Kzz) < 1e-14


def some_posterior(M, seed=2):
    root = draw(M, M, seed)
    return Posterior.build(
        torch.from_numpy(draw(M, 1, 5)[:, 0]), torch.from_numpy(root @ root.T + np.eye(M))
    )


def test_posterior_in_the_papers_coordinates():
    gp = SparseGP.build(Kernel("rbf", 2.0, 1.5), torch.from_numpy(draw(6, seed=1)))
    q = some_posterior(6)
    L, R = gp.L.numpy(), q.R.numpy()
    assert relative_error(q.covariance_u(gp), L @ np.linalg.inv(R) @ L.T) < 1e-12
    assert relative_error(q.mean_u(gp), L @ q.w.numpy()) < 1e-14


@pytest.mark.parametrize("name", NAMES)
def test_doubt_is_what_the_labels_leave_of_the_process_alone(name):
    x, z = np.vstack([draw(9), np.zeros((1, 3))]), draw(6, seed=1)
    gp = SparseGP.build(Kernel(name, 2.0, 1.5), torch.from_numpy(z), effect=0.7)
    q = some_posterior(6)
    found = doubt(Predictor.build(gp, q, -0.4), torch.from_numpy(x)).numpy()
    Kxx, Kxz = kernel(x, x, name, 2.0, 1.5), kernel(x, z, name, 2.0, 1.5)
    Kzz = kernel(z, z, name, 2.0, 1.5) + JITTER * 2.0 * np.eye(6)
    A = Kxz @ np.linalg.inv(Kzz)
    left = np.diag(Kxx - A @ (Kzz - q.covariance_u(gp).numpy()) @ A.T)
    # a linear process is known to be zero at the origin
    expected = np.sqrt(np.where(np.diag(Kxx) > 0, left / np.maximum(np.diag(Kxx), 1e-300), 0))
    np.testing.assert_allclose(found, expected, atol=1e-7)
    assert (found >= 0).all() and (found <= 1).all()


@pytest.mark.parametrize("strength", [0.0, 2.5])
def test_marginal_is_the_diagonal_of_joint_and_both_equal_the_paper(strength):
    bags = small_cohort(n_bags=6, sizes=(1, 15))
    x = torch.tensor(bags.features)
    z = draw(8, 4, seed=7)
    gp = SparseGP.build(Kernel("rbf", 1.7, 2.2), torch.from_numpy(z))
    q, c = some_posterior(8), -0.6
    predictor = Predictor.build(gp, q, c)
    mean, variance = np.empty(bags.n_instances), np.empty(bags.n_instances)
    for part in parts(bags.adjacency, bags.offsets, strength):
        found = marginal(predictor, part, x[part.rows])
        rows = part.rows.numpy()
        mean[rows], variance[rows] = (f.numpy() for f in found)

    edges = Edges.of(bags.adjacency, "cpu")
    together = Dense.of(edges, bags.offsets, np.arange(6), strength)
    Kzz_inv = np.linalg.inv(kernel(z, z, "rbf", 1.7, 2.2) + JITTER * 1.7 * np.eye(8))
    Sigma_u, mu_u = q.covariance_u(gp).numpy(), q.mean_u(gp).numpy()
    for b, bag in enumerate(bags):
        rows = slice(bags.offsets[b], bags.offsets[b + 1])
        xb = bags.features[rows]
        S = coupling_matrix(bag.adjacency.toarray(), strength)
        A = kernel(xb, z, "rbf", 1.7, 2.2) @ Kzz_inv
        cov_f = kernel(xb, xb, "rbf", 1.7, 2.2) - A @ (np.linalg.inv(Kzz_inv) - Sigma_u) @ A.T
        expected_mean, expected = S @ (c + A @ mu_u), S + S @ cov_f @ S
        (part,) = dense_parts(bag.adjacency, bag.offsets, np.array([0]), strength)
        jm, jc = (out[0] for out in joint(predictor, part, x[rows]))
        assert relative_error(jm, expected_mean) < 1e-10
        assert relative_error(jc, expected) < 1e-10
        assert relative_error(mean[rows], expected_mean) < 1e-10
        assert relative_error(variance[rows], np.diag(expected)) < 1e-10
        with torch.no_grad():  # side by side with others, on loops that know no derivatives
            jm, jc = (out[b] for out in joint(predictor, together, x[together.rows]))
        n = len(xb)
        assert relative_error(jm[:n], expected_mean) < 1e-10
        assert relative_error(jc[:n, :n], expected) < 1e-10
