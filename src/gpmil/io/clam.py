"""CLAM: ``h5_files/<slide>.h5`` with positions, ``pt_files/<slide>.pt`` without.

    features (N, D), coords (N, 2) in level-0 pixels, no attributes

The patch size is in ``patches/<slide>.h5``, wherever that lies: patch_size and downsample at
`coords`. Every piece of tissue starts a grid of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpmil.io import h5
from gpmil.io.slides import Slide
from gpmil.io.torch_files import tensor_slide


@contextmanager
def open_slide(path: Path, beside: Path | None = None) -> Iterator[Slide]:
    """One slide; `beside` is the file of its patches."""
    if path.suffix == ".pt":
        yield tensor_slide(path)
        return
    with h5.opened(path) as file:
        yield h5.slide(file, h5.dataset(file, "features"), h5.level0_facts(file, beside))
