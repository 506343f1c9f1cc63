"""Naive twins of the networks: plain numpy, a loop over bags and instances, float64.

`weights` are the arrays of a fitted model (`model.weights_`), `x` the inputs of one bag as the
network sees them (standardised).
"""

import math

import numpy as np


def embedded(x, weights):
    """h_i = ReLU(W x_i + c)."""
    W, c = weights["embed.weight"], weights["embed.bias"]
    h = np.zeros((len(x), len(c)))
    for i in range(len(x)):
        for k in range(len(c)):
            h[i, k] = max(0.0, sum(W[k, d] * x[i, d] for d in range(x.shape[1])) + c[k])
    return h


def scores(h, weights):
    """s_i = w_a' tanh(V h_i + v), times sigmoid(U h_i + u) inside where there is a gate."""
    V, v, w = weights["attend.weight"], weights["attend.bias"], weights["score.weight"][0]
    s = np.zeros(len(h))
    for i in range(len(h)):
        for k in range(len(v)):
            term = math.tanh(V[k] @ h[i] + v[k])
            if "gate.weight" in weights:
                pre = weights["gate.weight"][k] @ h[i] + weights["gate.bias"][k]
                term *= 1 / (1 + math.exp(-pre))
            s[i] += w[k] * term
    return s


def laplacian(adjacency):
    """C = diag(A 1) - A, entry by entry."""
    n = len(adjacency)
    C = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            C[i, j] = sum(adjacency[i]) if i == j else -adjacency[i, j]
    return C


def smoothed(s, adjacency, alpha):
    """(I + alpha C)^-1 s by a dense solve."""
    return np.linalg.solve(np.eye(len(s)) + alpha * laplacian(adjacency), s)


def smoothed_slope(s, adjacency, alpha):
    """d/d alpha of it: -(I + alpha C)^-1 C (I + alpha C)^-1 s."""
    return -smoothed(laplacian(adjacency) @ smoothed(s, adjacency, alpha), adjacency, alpha)


def softmax(s):
    """exp(s_i) / sum_j exp(s_j)."""
    e = [math.exp(value - max(s)) for value in s]
    return np.array([value / sum(e) for value in e])


def attention(x, weights, adjacency=None, alpha=0.0):
    """a over one bag."""
    s = scores(embedded(x, weights), weights)
    return softmax(s if adjacency is None else smoothed(s, adjacency, alpha))


def attention_logit(x, weights, adjacency=None, alpha=0.0):
    """w' sum_i a_i h_i + b."""
    h, a = embedded(x, weights), attention(x, weights, adjacency, alpha)
    z = sum(a[i] * h[i] for i in range(len(x)))
    return float(weights["classify.weight"][0] @ z + weights["classify.bias"][0])


def instance_logits(x, weights):
    """w'h_i + b."""
    w, b = weights["classify.weight"][0], weights["classify.bias"][0]
    return np.array([float(w @ h + b) for h in embedded(x, weights)])


def mean_logit(x, weights):
    """w' mean_i h_i + b."""
    h = embedded(x, weights)
    z = sum(h[i] for i in range(len(x))) / len(x)
    return float(weights["classify.weight"][0] @ z + weights["classify.bias"][0])


def max_logit(x, weights):
    """max_i (w'h_i + b)."""
    return max(instance_logits(x, weights))
