"""Novelty as process/novelty.py states it, with explicit inverses and refits for every patient."""

import numpy as np


def explained(own, W, seen):
    """e_i = w'(I - (I + sum w_j w_j')^-1) w / k, `seen` the rows of the training patches."""
    inverse = np.linalg.inv(np.eye(W.shape[1]) + sum(np.outer(w, w) for w in seen))
    return np.array([w @ (np.eye(len(w)) - inverse) @ w / own for w in W])


def distance(phi, others, seen, ridge=0.01):
    """min_j (phi - phi_j)'(C + r I)^-1 (phi - phi_j)."""
    C = np.cov(seen.T, bias=True)
    A = np.linalg.inv(C + ridge * np.trace(C) / len(C) * np.eye(len(C)))
    return min((phi - other) @ A @ (phi - other) for other in others)


def scores(slides, own, patient):
    """d_b and -log mean e_i of every training slide, and all -log e_i; each without its patient."""
    d, e = [], []
    for b, W in enumerate(slides):
        rest = [slides[j] for j in range(len(slides)) if patient[j] != patient[b]]
        d.append(distance(W.mean(0), [w.mean(0) for w in rest], np.vstack(rest)))
        e.append(explained(own, W, np.vstack(rest)))
    return np.stack([d, -np.log([a.mean() for a in e])], axis=1), -np.log(np.concatenate(e))


def fence(values, c):
    """Q3 + c (Q3 - Q1) of the logarithms."""
    first, third = np.percentile(np.log(values), [25, 75])
    return np.exp(third + c * (third - first))
