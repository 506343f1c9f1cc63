"""A cohort in a few lines: what `Bags` shows of itself."""

from typing import Any

import numpy as np

from gpmil.data.checks import UNKNOWN, count

_LABEL_WORDS = (("positive", 1), ("negative", 0), ("unlabelled", UNKNOWN))


def describe(bags: Any) -> list[str]:
    """The lines that a cohort of `Bags` shows of itself."""
    counts = [(word, int((bags.labels == value).sum())) for word, value in _LABEL_WORDS]
    kinds = ", ".join(f"{n:,} {word}" for word, n in counts if n)
    lines = [
        f"Bags: {count(len(bags), 'bag')}{f' ({kinds})' if kinds else ''}, "
        f"{count(bags.n_instances, 'instance')} x {count(bags.n_features, 'feature')}, "
        f"{bags.features.dtype}{' on disk' if isinstance(bags.features, np.memmap) else ''}"
    ]
    if len(bags):
        low, middle, high = np.quantile(bags.sizes, [0, 0.5, 1])
        lines.append(f"instances per bag: {low:,.0f} to {high:,.0f}, median {middle:,g}")
    lines.append(_describe_graph(bags))
    if bags.groups is not None:
        lines.append(f"groups: {len(np.unique(bags.groups)):,}")
    known = int((bags.instance_labels != UNKNOWN).sum())
    if known:
        positive = int((bags.instance_labels == 1).sum())
        lines.append(f"instance labels: {known:,} known, {positive:,} of them positive")
    return lines


def _describe_graph(bags: Any) -> str:
    if bags.graph is None:
        return "graph: none" + (" (positions given)" if bags.coords is not None else "")
    degree = np.diff(bags.adjacency.indptr)
    mean = degree.mean() if len(degree) else 0.0
    return (
        f"graph: {bags.graph}, {count(bags.adjacency.nnz // 2, 'edge')}, {mean:.3g} neighbours "
        f"per instance, {count(int((degree == 0).sum()), 'instance')} without"
    )
