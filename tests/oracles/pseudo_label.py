"""Naive twins of the pseudo labels: loops over bags, exact shares, nothing vectorised."""

from fractions import Fraction
from math import floor


def labels_by_loop(scores, positive, offsets, top, low):
    """1, 0 or -1 an instance: sort every positive bag, mark its two ends."""
    labels = []
    for b, is_positive in enumerate(positive):
        own = [float(s) for s in scores[offsets[b] : offsets[b + 1]]]
        if not is_positive:
            labels += [0] * len(own)
            continue
        best_first = sorted(range(len(own)), key=lambda i: (-own[i], i))
        n_top = max(1, floor(Fraction(str(top)) * len(own)))
        n_low = min(floor(Fraction(str(low)) * len(own)), len(own) - n_top)
        marks = [-1] * len(own)
        for i in best_first[:n_top]:
            marks[i] = 1
        for i in best_first[len(own) - n_low :]:
            marks[i] = 0
        labels += marks
    return labels


def balanced_by_loop(labels, weights):
    """n w_i / (2 sum of the weights of the class of i)."""
    total = {c: sum(w for k, w in zip(labels, weights) if k == c) for c in (0, 1)}
    return [len(labels) * w / (2 * total[k]) for k, w in zip(labels, weights)]


def lesson_by_loop(labels, probability):
    """(row, label, weight): certain ones once, the others once with each label."""
    known = [(i, k, 1.0) for i, k in enumerate(labels) if k != -1]
    if probability is None:
        return known
    ones = [(i, 1, probability[i]) for i, k in enumerate(labels) if k == -1]
    zeros = [(i, 0, 1 - probability[i]) for i, k in enumerate(labels) if k == -1]
    return known + ones + zeros
