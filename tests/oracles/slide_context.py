"""Naive twin of the slide context: v_b of every bag, with loops and explicit solves, in NumPy."""

import numpy as np

from oracles.model import JITTER, kernel


def places(inputs, trained_on=None):
    """z of every bag: its mean, centred over the training bags, divided by one number."""
    means = np.array([x.mean(0) for x in inputs])
    training = means if trained_on is None else np.array([x.mean(0) for x in trained_on])
    center = training.mean(0)
    return (means - center) / np.sqrt(((training - center) ** 2).mean())


def rows(z, points, variance, lengthscale):
    """v_b = k_s(z_b, Z_s) L_s^-T."""
    Kzz = kernel(points, points, "rbf", variance, lengthscale)
    L = np.linalg.cholesky(Kzz + JITTER * variance * np.eye(len(points)))
    return np.linalg.solve(L, kernel(points, z, "rbf", variance, lengthscale)).T
