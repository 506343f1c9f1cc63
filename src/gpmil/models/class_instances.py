"""What a model of several classes says of every instance: a probability per class."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float

from gpmil.models.base import InstancePredictions

Own = TypeVar("Own", bound="ClassInstances")


@dataclass(frozen=True)
class ClassInstances(InstancePredictions):
    """As `InstancePredictions`, `probability` that of any class but the first; and all of them."""

    class_probability: Float[np.ndarray, "N K"] | None = None
    classes: np.ndarray | None = None  # (K,), the names of the columns

    @classmethod
    def of(
        cls: type[Own], found: InstancePredictions, p: Float[np.ndarray, "N K"], classes: np.ndarray
    ) -> Own:
        """With P(h_i = c) of every instance and class."""
        return cls(**vars(found) | {"class_probability": p, "classes": classes})

    def split(self) -> list[InstancePredictions]:
        """One per bag."""
        assert self.class_probability is not None and self.classes is not None
        own = np.split(self.class_probability, self.bags.offsets[1:-1])
        parts = zip(super().split(), own, strict=True)
        return [type(self).of(part, p, self.classes) for part, p in parts]

    def to_frame(self) -> pd.DataFrame:
        """With a column per class, "P(class)"."""
        assert self.class_probability is not None and self.classes is not None
        columns = {f"P({c})": p for c, p in zip(self.classes, self.class_probability.T)}
        return super().to_frame().assign(**columns)
