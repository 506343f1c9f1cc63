"""What is known of some bags without their features: what a partition tells of its own."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from gpmil.data.bags import Bags


@dataclass(frozen=True)
class Facts:
    """What is known of some bags without their features."""

    names: np.ndarray
    labels: Int[np.ndarray, " B"]
    sizes: Int[np.ndarray, " B"]
    n_features: int
    n_edges: int
    graph: str | None
    has_geometry: bool
    class_names: tuple[str, str] | None
    extraction: dict[str, Any]  # as in Bags.facts
    y: np.ndarray | None = None  # labels that were given beside the bags
    groups: Shaped[np.ndarray, " B"] | None = None  # patients

    @classmethod
    def of(cls, bags: Bags, y: np.ndarray | None = None) -> "Facts":
        """The facts of some bags."""
        return cls(
            bags.names, bags.labels, bags.sizes, bags.n_features, bags.adjacency.nnz // 2,
            bags.graph, bags.has_geometry, bags.class_names, dict(bags.facts), y, bags.groups,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def n_instances(self) -> int:
        """Number of instances."""
        return int(self.sizes.sum())
