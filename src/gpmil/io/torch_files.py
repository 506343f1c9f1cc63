"""Bare tensors saved by torch, mapped and not executed."""

from pathlib import Path
from typing import Any

import numpy as np

from gpmil.io.slides import BadSlide, Slide, patch_shape


def tensor_slide(path: Path, **parts: Any) -> Slide:
    """A slide from a file that holds one (n, D) tensor."""
    import torch  # slow to import, and most formats need none of it

    tensor = _load(path, torch)
    if not isinstance(tensor, torch.Tensor):
        raise BadSlide(f"expected a tensor (patches, features), found a {type(tensor).__name__}")
    shape = patch_shape(tuple(tensor.shape), "the tensor")
    tensor = tensor.detach().reshape(shape)
    # numpy has no bfloat16; float32 holds its values exactly
    wide = tensor.dtype == torch.bfloat16
    return Slide(
        shape=shape,
        dtype=np.dtype(np.float32) if wide else tensor[:0].numpy().dtype,
        rows=lambda a, b: (tensor[a:b].float() if wide else tensor[a:b]).numpy(),
        **parts,
    )


def _load(path: Path, torch: Any) -> Any:
    for mapped in (True, False):  # files of torch before 1.6 cannot be mapped
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:
            failure = error
    reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    raise BadSlide(f"cannot be read by torch.load(weights_only=True): {reason}") from failure
