"""Arrays in .npy and .npz files that others wrote: nothing in them runs or is trusted."""

import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gpmil.files.foreign import BadFile, reading

EMPTY = 128  # bytes of a header: such an array has no value, and cannot be mapped


def npy(path: Path, error: type[BadFile] = BadFile) -> np.ndarray:
    """The array of an .npy file, mapped; a file of another size than it claims is refused."""
    with reading(path, ".npy", error):
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(6) != np.lib.format.MAGIC_PREFIX:
                raise error(f"{path} is no .npy file, or not all of it is there")
        array = np.load(path, mmap_mode="r" if size > EMPTY else None, allow_pickle=False)
        _require_plain(array, path, error)
        claimed = array.offset + array.nbytes if isinstance(array, np.memmap) else size
        if claimed != size:
            raise error(
                f"{path}: claims shape {array.shape} of type {array.dtype}, {claimed:,} bytes, and "
                f"has {size:,}"
            )
    return array


def npz(
    path: Path, names: Iterable[str] | None = None, error: type[BadFile] = BadFile
) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, those of `names` that are there; checksums are looked at."""
    with reading(path, ".npz", error), zipfile.ZipFile(path) as file:
        members = [m.filename for m in file.infolist()]
        twice = sorted({m for m in members if members.count(m) > 1})
        if twice:
            raise error(f"{path}: {twice[0]} is in it more than once")
        wanted = None if names is None else {f"{name}.npy" for name in names}
        return {
            member.removesuffix(".npy"): _member(file, member, path, error)
            for member in members
            if wanted is None or member in wanted
        }


def _member(file: zipfile.ZipFile, name: str, path: Path, error: type[BadFile]) -> np.ndarray:
    with file.open(name) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):  # at the end, and only there, the checksum is compared
            raise error(f"{path}: {name} holds more than shape {array.shape} of {array.dtype}")
    _require_plain(array, path, error)
    return array


def _require_plain(array: np.ndarray, path: Path, error: type[BadFile]) -> None:
    """Refuse types that claim any number of values in no byte, or values of several parts."""
    if array.dtype.kind not in "biufSUc" or array.dtype.itemsize == 0:
        raise error(f"{path}: expected numbers or text, found type {array.dtype}")
    if array.dtype.kind == "U" and array.size:
        codes = np.ascontiguousarray(array).view(f"{array.dtype.byteorder}u4")
        if codes.max() > sys.maxunicode:
            raise error(f"{path}: expected text, found characters that there are not")
