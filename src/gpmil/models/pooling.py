"""Mean and maximum pooling: the simplest networks of bags, to compare the others with."""

import math

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import expit
from torch import Tensor

from gpmil.models.base import InstancePredictions
from gpmil.models.batches import Batch
from gpmil.models.deep import DeepMIL
from gpmil.models.networks import Network, linear, segment_max, segment_mean


class PoolingNetwork(Network):
    """An embedding and one linear classifier."""

    def __init__(self, n_inputs: int, hidden_dim: int, dropout: float, random: torch.Generator):
        super().__init__(n_inputs, hidden_dim, dropout, random)
        self.classify = linear(hidden_dim, 1, random)


class MeanNetwork(PoolingNetwork):
    """logit = w' mean_i h_i + b."""

    def forward(self, batch: Batch) -> Float[Tensor, " b"]:
        """One logit per bag."""
        z = segment_mean(self.embedding(batch.x), batch.segment, len(batch))
        return self.classify(z)[:, 0]


class MaxNetwork(PoolingNetwork):
    """logit = max_i (w' h_i + b)."""

    def instances(self, batch: Batch) -> Float[Tensor, " n"]:
        """One logit per instance."""
        return self.classify(self.embedding(batch.x))[:, 0]

    def forward(self, batch: Batch) -> Float[Tensor, " b"]:
        """One logit per bag."""
        return segment_max(self.instances(batch), batch.segment, len(batch))


class MeanPoolMIL(DeepMIL):
    """The mean of the embedded instances, classified.

    logit_b = w' mean_i h_i + b with h_i = ReLU(W x_i + c).

    Parameters
    ----------
    hidden_dim : int
        Dimension of the embedding h.
    dropout : float
        Share of h set to zero while training.
    learning_rate, weight_decay : float
        Of the AdamW optimiser.
    max_epochs, batch_size : int
        Passes over the bags; bags per step.
    validation, patience : None or float, int
        Hold that share of the bags out of the training (both classes, patients of `bags.groups`
        kept together), stop when their loss has not fallen for `patience` epochs and take the
        weights of the best epoch. None: train on all bags for `max_epochs`.
    class_weight : "balanced" or None
        Balanced: both classes weigh the same in the loss. Probabilities are then those of a
        population with as many positive as negative bags.
    standardize, n_components : bool, int or None
        Standardise the columns of the features; or reduce them to PCA scores first.
    random_state : int, Generator or None
        Seeds the first weights, the order of the bags, dropout and the bags held out.
    device, dtype : str or None, "float32" or "float64"
        None takes a GPU where there is one.
    verbose : bool
        Show progress lines while fitting.

    Attributes
    ----------
    weights_ : dict of arrays
        The trained network.
    history_ : list of dict
        For every epoch its number ("epoch"), "train_loss" and "validation_loss" (None where no
        bags were held out).
    n_epochs_, best_epoch_ : int
        Epochs trained, and the one whose weights the model has.
    converged_ : bool or None
        Whether training stopped by itself before `max_epochs`; None where no bags were held out.

    Examples
    --------
    >>> import numpy as np
    >>> from gpmil import Bags
    >>> rng = np.random.default_rng(0)
    >>> x = [rng.normal(size=(8, 3)) + 3 * (b % 2) * (np.arange(8) < 3)[:, None] for b in range(20)]
    >>> bags = Bags.from_arrays(x, labels=[b % 2 for b in range(20)])
    >>> model = MeanPoolMIL(learning_rate=1e-2, random_state=0).fit(bags)
    >>> float(model.score(bags)) > 0.9
    True
    """

    network_class = MeanNetwork

    def predict_instances(self, bags) -> InstancePredictions:
        """Refused: a mean over the bag has no part that is one instance's probability."""
        raise ValueError(
            "MeanPoolMIL classifies the mean of a bag and has no probability for an instance. "
            "Use VGPMILPRI for probabilities and marks of instances, or MaxPoolMIL for logits."
        )


class MaxPoolMIL(DeepMIL):
    """A logit for every embedded instance; the largest is the bag's.

    logit_b = max_i (w'h_i + b) with h_i = ReLU(W x_i + c).

    Parameters
    ----------
    **settings
        As `MeanPoolMIL`.

    Examples
    --------
    >>> import numpy as np
    >>> from gpmil import Bags
    >>> rng = np.random.default_rng(0)
    >>> x = [rng.normal(size=(8, 3)) + 4 * (b % 2) * (np.arange(8) < 1)[:, None] for b in range(20)]
    >>> bags = Bags.from_arrays(x, labels=[b % 2 for b in range(20)])
    >>> model = MaxPoolMIL(learning_rate=1e-2, random_state=0).fit(bags)
    >>> model.predict_instances(bags).probability.shape
    (160,)
    """

    network_class = MaxNetwork

    def predict_instances(self, bags) -> InstancePredictions:
        """The logit of every instance as `mean`, and `probability` = 1 / (1 + exp(-logit)).

        Read as P(m*_i > 0) of a variable m*_i with a logistic distribution about the logit; its
        deviation, pi / sqrt 3, is the same for all and says nothing of what the network does not
        know. Training sees only the largest logit of a bag: probabilities rank instances, they
        are not calibrated.
        """
        bags = self._check_predictable(bags)
        logit = self._per_instance(bags, MaxNetwork.instances)
        std = np.full(bags.n_instances, math.pi / math.sqrt(3))
        return InstancePredictions(expit(logit), logit, std, bags)
