"""Networks for grades, to compare OrdinalMIL with: one logit per bag, and cumulative logits.

P(Y >= k) = 1 / (1 + exp(theta_k - eta_b)), eta_b the logit of attention or of mean pooling,
theta_1 = 0 < theta_2 < ..., the thresholds trained with the weights (McCullagh 1980).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpmil.data.bags import Bags
from gpmil.models import saved_checks
from gpmil.models.attention import AttentionMIL, AttentionNetwork, AttentionSettings
from gpmil.models.base import log_odds
from gpmil.models.batches import Batch
from gpmil.models.deep import DeepMIL, NetworkSettings
from gpmil.models.graded import GradedClassifier, differences
from gpmil.models.networks import Network
from gpmil.models.pooling import MeanNetwork, MeanPoolMIL
from gpmil.models.several import with_counts
from gpmil.models.training import Training


class CumulativeNetwork(Network):
    """A network whose logit is cut into grades."""

    def __init__(self, n_grades: int, **architecture: Any):
        super().__init__(**architecture)
        self.gaps = nn.Parameter(torch.zeros(n_grades - 1, dtype=torch.float64))

    def thresholds(self) -> Float[Tensor, " k"]:
        """theta_1 = 0, theta_2, ..., rising; the logit's own bias stands for the first gap."""
        steps = nn.functional.softplus(self.gaps)
        return steps.cumsum(0) - steps[0]


class OrdinalAttentionNetwork(CumulativeNetwork, AttentionNetwork):
    """Attention, its logit cut into grades."""


class OrdinalMeanNetwork(CumulativeNetwork, MeanNetwork):
    """The mean of the embedded instances, its logit cut into grades."""


class OrdinalTraining(Training):
    """Training on grades: `labels` are 0, 1, ..., K - 1."""

    def _losses(self, network: Any, batch: Batch) -> Float[Tensor, " b"]:
        grade, weights = (a.index_select(0, batch.chosen) for a in (self.labels, self.weights))
        return -weights * log_probability(network(batch), network.thresholds(), grade.long())


def log_probability(
    eta: Float[Tensor, " b"], theta: Float[Tensor, " k"], grade: Tensor
) -> Float[Tensor, " b"]:
    """log P(Y = grade) = log(s(a) - s(b)), a = eta - theta_grade, b = eta - theta_grade+1.

    s(a) - s(b) = s(a) s(-b) (1 - e^(b - a)), s the logistic function.
    """
    ends = theta.new_full((1,), torch.inf)
    low = torch.cat([-ends, theta]).index_select(0, grade)
    high = torch.cat([theta, ends]).index_select(0, grade)
    log_sigmoid = nn.functional.logsigmoid
    between = torch.log(-torch.expm1(low - high))
    return log_sigmoid(eta - low) + log_sigmoid(high - eta) + between


class GradedNetwork(GradedClassifier, DeepMIL):
    """A network of grades: what is not the architecture's."""

    ARRAYS = with_counts(DeepMIL.ARRAYS)
    training_class = OrdinalTraining

    def _targets(self, labels: np.ndarray) -> np.ndarray:
        return self._codes

    def _fit(self, bags: Bags, y: Any) -> None:
        super()._fit(bags, y)
        del self._codes

    def _architecture(self, bags: Bags) -> dict[str, Any]:
        return super()._architecture(bags) | {"n_grades": len(self.classes_)}

    def predict_proba(self, bags) -> Float[np.ndarray, "B K"]:
        """P(Y = k) of each bag and grade."""
        log_p, _ = self.log_proba_negative(bags)
        network: Any = self._network()
        network.load_state_dict({k: torch.from_numpy(v) for k, v in self.weights_.items()})
        theta = network.thresholds().detach().double().numpy()
        # log P(Y <= k) = -log(1 + exp(eta - theta_k+1)), eta the log odds at theta_1 = 0
        higher = -np.logaddexp(0, log_odds(log_p)[:, None] - theta[1:])
        return differences(np.hstack([log_p[:, None], higher]))

    def _check_settings(self) -> None:
        super()._check_settings()
        self._check_grade_settings()

    def _saved_architecture(self, n_inputs: int) -> dict[str, Any]:
        return super()._saved_architecture(n_inputs) | {"n_grades": len(self.class_counts_)}

    def _weight_shapes(self) -> dict[str, saved_checks.Shape]:
        return super()._weight_shapes() | {"gaps": (len(self.class_counts_) - 1,)}

    def _restore(self, arrays: Any, card: Any, sizes: Any) -> None:
        self._restore_classes()
        super()._restore(arrays, card, sizes)


@dataclass(kw_only=True, eq=False, repr=False)
class OrdinalAttentionSettings(AttentionSettings):
    """And those of grades, as of OrdinalMIL."""

    grades: Any = None
    cost: Any = "quadratic"


@dataclass(kw_only=True, eq=False, repr=False)
class OrdinalMeanSettings(NetworkSettings):
    """And those of grades, as of OrdinalMIL."""

    grades: Any = None
    cost: Any = "quadratic"


class OrdinalAttentionMIL(OrdinalAttentionSettings, GradedNetwork, AttentionMIL):
    """Attention-based MIL for grades, by cumulative logits: a baseline of OrdinalMIL.

    Settings as of AttentionMIL, `grades` and `cost` as of OrdinalMIL.
    """

    network_class = OrdinalAttentionNetwork  # type: ignore[assignment]


class OrdinalMeanPoolMIL(OrdinalMeanSettings, GradedNetwork, MeanPoolMIL):
    """Mean pooling with ordinal regression, by cumulative logits: a baseline of OrdinalMIL.

    Settings as of MeanPoolMIL, `grades` and `cost` as of OrdinalMIL.
    """

    network_class = OrdinalMeanNetwork  # type: ignore[assignment]
