"""Bare tensors saved by torch, mapped and not executed."""

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from gpmil.files.foreign import reading
from gpmil.io.slides import BadSlide, Slide, patch_shape

DATA = re.compile(r"/data/\d+$")
"""Names of the records with values in a file of torch, which is a zip file."""


def tensor_slide(path: Path, **parts: Any) -> Slide:
    """A slide from a file that holds one (n, D) tensor."""
    import torch  # slow to import, and most formats need none of it

    tensor = _plain(_load(path, torch), torch)
    shape = patch_shape(tuple(tensor.shape), "the tensor")
    tensor = tensor.reshape(shape)
    # numpy has no bfloat16; float32 holds its values exactly
    wide = tensor.dtype == torch.bfloat16
    return Slide(
        shape=shape,
        dtype=np.dtype(np.float32) if wide else tensor[:0].numpy().dtype,
        rows=lambda a, b: (tensor[a:b].float() if wide else tensor[a:b]).numpy(),
        **parts,
    )


def _plain(loaded: Any, torch: Any) -> Any:
    """A tensor with a value of its own for every place; all other kinds are refused."""
    if not isinstance(loaded, torch.Tensor):
        raise BadSlide(f"expected a tensor (patches, features), found a {type(loaded).__name__}")
    odd = [kind for kind in ("sparse", "meta", "quantized", "nested") if _is(loaded, kind)]
    if odd or loaded.layout != torch.strided:
        kind = odd[0] if odd else loaded.layout
        raise BadSlide(f"expected a plain tensor (patches, features), found a {kind} one")
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
    if loaded.dtype not in types + whole:
        raise BadSlide(f"features: expected float16, 32 or 64, found type {loaded.dtype}")
    if loaded.numel() * loaded.element_size() > loaded.untyped_storage().nbytes():
        raise BadSlide(
            f"the tensor claims shape {tuple(loaded.shape)} and holds "
            f"{loaded.untyped_storage().nbytes():,} bytes"
        )
    return loaded.detach().resolve_neg()


def _is(tensor: Any, kind: str) -> bool:
    return bool(getattr(tensor, f"is_{kind}"))


def _load(path: Path, torch: Any) -> Any:
    """What `torch.load` gives, which looks at no checksum itself."""
    with reading(path, "a tensor of torch", BadSlide):
        zipped = _is_zip(path)  # files of torch before 1.6 are not, and cannot be mapped
        sizes = _checked_records(path) if zipped else []
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        if zipped and isinstance(loaded, torch.Tensor) and loaded.layout == torch.strided:
            nbytes = 0 if loaded.is_meta else loaded.untyped_storage().nbytes()
            if sizes != [nbytes]:
                raise BadSlide(f"the tensor claims {nbytes:,} bytes, its record has {sizes}")
        return loaded


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _checked_records(path: Path) -> list[int]:
    """Sizes of the records of values, all of which are as their checksums say."""
    with zipfile.ZipFile(path) as records:
        # torch.serialization.set_crc32_options(False) writes zeros
        damaged = records.testzip() if any(r.CRC for r in records.infolist()) else None
        if damaged is not None:
            raise BadSlide(
                f"its part {damaged or 'without a name'} is damaged. Copy the file again"
            )
        if any(r.compress_type != zipfile.ZIP_STORED for r in records.infolist()):
            raise BadSlide("it was packed again as a zip file: torch would map what is packed")
        return [r.file_size for r in records.infolist() if DATA.search(r.filename)]
