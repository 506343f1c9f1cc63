"""MKL rounds by where an array begins: what it multiplies begins where a line of memory does.

NumPy's arrays begin anywhere, and the same fit would end in other last digits from run to run.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpmil import VGPMILPRI, simulate
from gpmil.fast.memory import LINE

MULTIPLIED = ("mm", "mv", "dot", "solve", "cholesky", "triangular")


class Looked(TorchDispatchMode):
    """Collects products with an array of its own that begins between two lines."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.name().split("::")[1]
        if any(part in name for part in MULTIPLIED):
            self.found += [(name, tuple(x.shape)) for x in args if between_lines(x)]
        return op(*args, **(kwargs or {}))


def between_lines(x):
    """Not parts of larger arrays: they lie as these do in every run."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.storage_offset():
        return False
    return x.numel() > 1 and x.data_ptr() % LINE > 0


def test_what_is_looked_at():
    room = np.zeros(64)
    start = int(-room.ctypes.data % LINE // 8) + 1
    with Looked() as looked:
        torch.ones(4, dtype=torch.float64) @ torch.from_numpy(room[start : start + 4])
    assert looked.found == [("dot", (4,))]


def test_what_mkl_multiplies_begins_with_a_line():
    bags = simulate.cohort(n_bags=12, mean_size=40, seed=2)
    with Looked() as looked:
        given = {"slide_context": "auto", "tuning_budget": 8, "n_inducing": 30}
        model = VGPMILPRI(random_state=0, **given).fit(bags)
        model.predict_proba(bags)
    assert not looked.found
