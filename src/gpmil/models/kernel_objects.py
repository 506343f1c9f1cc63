"""A user's kernel object on disk: its numbers, and a column of values to know it again by."""

import copy
from typing import Any

import gpytorch
import numpy as np
import torch

from gpmil.process.kernels import Kernel


def kernel_arrays(kernel: gpytorch.kernels.Kernel, inducing: torch.Tensor) -> dict[str, np.ndarray]:
    """The parameters of a kernel object, and a column of its values to know it again by."""
    state = {f"kernel.{k}": v.detach().cpu().numpy() for k, v in kernel.state_dict().items()}
    return state | {"kernel_values": _kernel_column(kernel, inducing)}


def _kernel_column(kernel: gpytorch.kernels.Kernel, inducing: torch.Tensor) -> np.ndarray:
    return Kernel(kernel, 1.0, 1.0)(inducing, inducing[:1])[:, 0].numpy()


def fill_kernel(name: str, kernel: Any, arrays: dict[str, np.ndarray]) -> gpytorch.kernels.Kernel:
    """The user's new kernel object with the saved numbers in it."""
    if type(kernel).__name__ != name:
        raise ValueError(
            f"the model was fitted with a kernel object of class {name}: pass a new one, "
            f"gpmil.load(path, kernel={name}(...)), and its saved values are filled in."
        )
    state = {
        k.removeprefix("kernel."): torch.from_numpy(v)
        for k, v in arrays.items()
        if k.startswith("kernel.")
    }
    kernel = copy.deepcopy(kernel)
    try:
        kernel.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"the saved values do not fit this kernel: build it as it was for fit. {error}"
        ) from error
    return kernel


def compare_kernel(
    kernel: gpytorch.kernels.Kernel, inducing: torch.Tensor, arrays: dict[str, np.ndarray]
) -> None:
    """Refuse a kernel object that gives other values than the one of the fit."""
    if not np.allclose(_kernel_column(kernel, inducing), arrays["kernel_values"], rtol=1e-6):
        raise ValueError(
            "this kernel takes the saved parameters but gives other values than the one the model "
            "was fitted with: build it as it was for fit (its parts, the order of a Matern)."
        )
