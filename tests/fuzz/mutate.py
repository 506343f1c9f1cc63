"""Damage: bytes of any file, and the structure of files of known kinds.

Every function draws from the generator it is given and from nothing else.
"""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Rng = np.random.Generator

# ------------------------------------------------------------------ bytes

HUGE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def _span(data: bytes, rng: Rng) -> tuple[int, int]:
    """A piece of the file, short ones as often as long ones."""
    size = int(min(len(data), 2 ** rng.integers(0, 11)))
    start = int(rng.integers(0, max(1, len(data) - size + 1)))
    return start, start + size


def flip_bits(data: bytes, rng: Rng) -> bytes:
    changed = bytearray(data)
    for _ in range(int(2 ** rng.integers(0, 5))):
        if changed:
            changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def zero(data: bytes, rng: Rng) -> bytes:
    a, b = _span(data, rng)
    return data[:a] + bytes(b - a) + data[b:]


def ones(data: bytes, rng: Rng) -> bytes:
    a, b = _span(data, rng)
    return data[:a] + b"\xff" * (b - a) + data[b:]


def noise(data: bytes, rng: Rng) -> bytes:
    a, b = _span(data, rng)
    return data[:a] + rng.bytes(b - a) + data[b:]


def truncate(data: bytes, rng: Rng) -> bytes:
    return data[: int(rng.integers(0, len(data) + 1))]


def delete(data: bytes, rng: Rng) -> bytes:
    a, b = _span(data, rng)
    return data[:a] + data[b:]


def repeat(data: bytes, rng: Rng) -> bytes:
    a, b = _span(data, rng)
    return data[:b] + data[a:b] + data[b:]


def insert(data: bytes, rng: Rng) -> bytes:
    a, b = _span(data, rng)
    return data[:a] + rng.bytes(b - a) + data[a:]


def splice(data: bytes, rng: Rng) -> bytes:
    """A piece of the file over another one."""
    a, b = _span(data, rng)
    start = int(rng.integers(0, max(1, len(data) - (b - a) + 1)))
    return data[:start] + data[a:b] + data[start + b - a :]


def huge_integer(data: bytes, rng: Rng) -> bytes:
    """Eight bytes, at a multiple of four, as a number of some importance."""
    start = 4 * int(rng.integers(0, max(1, len(data) // 4)))
    number = HUGE[rng.integers(len(HUGE))].to_bytes(8, "little")
    return data[:start] + number + data[start + 8 :]


BYTES: tuple[Callable[[bytes, Rng], bytes], ...] = (
    flip_bits, zero, ones, noise, truncate, delete, repeat, insert, splice, huge_integer,
)  # fmt: skip


def some_bytes(path: Path, rng: Rng) -> None:
    """One or two changes of the bytes of a file."""
    data = path.read_bytes()
    for _ in range(1 + int(rng.random() < 0.2)):
        data = BYTES[rng.integers(len(BYTES))](data, rng)
    path.write_bytes(data)


def other_file(path: Path, rng: Rng) -> None:
    """Something else under the name: another kind of file, nothing, a link to nowhere."""
    kind = rng.integers(6)
    others = (b"", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY\x01\x00", b"\x1f\x8b\x08\x00")
    path.unlink()
    if kind == 5:
        path.symlink_to(path.with_name("nowhere"))
    else:
        path.write_bytes(others[kind] + rng.bytes(int(rng.integers(0, 64))))


# ------------------------------------------------------------------ text

CELLS = (
    "", " ", "nan", "NaN", "inf", "-inf", "1e400", "-1e400", "1e308", "1e-320", "9" * 400,
    "-" + "9" * 400, "9" * 25, "0x10", "1_000", "None", "null", "True", "-1", "2", "0.5", "1.0",
    '"', "'", "a,b", "\x00", "\ufeff", "é", "\u202e", "=1+1", "../../x", "s0", "x" * 5000, "1;2",
)  # fmt: skip


def cells(path: Path, rng: Rng) -> None:
    """Cells, rows and names of a table of separated values; gzipped ones stay so."""
    import gzip

    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(1 + int(rng.integers(3))):
        TABLES[rng.integers(len(TABLES))](rows, rng)
    text = "\n".join(",".join(row) for row in rows) + "\n"
    encoded = text.encode(("utf-8", "utf-16", "latin-1")[rng.choice(3, p=(0.94, 0.03, 0.03))],
                          errors="replace")  # fmt: skip
    path.write_bytes(gzip.compress(encoded) if path.suffix == ".gz" else encoded)


def _row(rows: list[list[str]], rng: Rng) -> int:
    return int(rng.integers(len(rows)))


def _odd_cell(rows: list[list[str]], rng: Rng) -> None:
    row = rows[_row(rows, rng)] if rows else []
    if row:
        row[rng.integers(len(row))] = CELLS[rng.integers(len(CELLS))]


def _longer(rows: list[list[str]], rng: Rng) -> None:
    if rows:
        rows[_row(rows, rng)].insert(0, str(rng.integers(9)))


def _all_longer(rows: list[list[str]], rng: Rng) -> None:
    for k, row in enumerate(rows[1:]):
        row.insert(0, str(k))


def _shorter(rows: list[list[str]], rng: Rng) -> None:
    if rows:
        rows[_row(rows, rng)][int(rng.integers(3)) :] = []


def _twice(rows: list[list[str]], rng: Rng) -> None:
    if rows:
        rows.insert(_row(rows, rng), list(rows[_row(rows, rng)]))


def _without_row(rows: list[list[str]], rng: Rng) -> None:
    if rows:
        del rows[_row(rows, rng)]


def _swapped(rows: list[list[str]], rng: Rng) -> None:
    if rows:
        a, b = _row(rows, rng), _row(rows, rng)
        rows[a], rows[b] = rows[b], rows[a]


def _column_gone(rows: list[list[str]], rng: Rng) -> None:
    k = int(rng.integers(max(1, len(rows[0]) if rows else 1)))
    for row in rows:
        del row[k : k + 1]


def _same_name(rows: list[list[str]], rng: Rng) -> None:
    if rows and len(rows[0]) > 1:
        a, b = rng.integers(len(rows[0]), size=2)
        rows[0][a] = rows[0][b]


TABLES = (
    _odd_cell, _odd_cell, _odd_cell, _longer, _all_longer, _shorter, _twice, _without_row,
    _swapped, _column_gone, _same_name,
)  # fmt: skip

# ------------------------------------------------------------------ JSON

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e300, float("nan"), float("inf"), "", "x" * 1000, [], {}, [[]],
    {"class": {}}, ["a", 1], "\x00", 10**400,
)  # fmt: skip


def json_values(path: Path, rng: Rng) -> None:
    """Values replaced by odd ones, keys gone, or brackets without end."""
    if rng.random() < 0.1:
        path.write_text("[" * 100_000 + "]" * (100_000 * int(rng.integers(2))))
        return
    found = json.loads(path.read_text())
    holders = list(_holders(found))
    for _ in range(1 + int(rng.integers(3))):
        holder = holders[rng.integers(len(holders))]
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            continue
        key = keys[rng.integers(len(keys))]
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = VALUES[rng.integers(len(VALUES))]
    if rng.random() < 0.05:
        found = VALUES[rng.integers(len(VALUES))]
    _write_json(path, found)


def _write_json(path: Path, found: Any) -> None:
    import sys

    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        path.write_text(json.dumps(found))
    finally:
        sys.set_int_max_str_digits(limit)


def _holders(value: Any):
    if isinstance(value, (dict, list)):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


# ------------------------------------------------------------------ numpy


def odd_array(rng: Rng, like: np.ndarray) -> np.ndarray:
    """An array that is not what is expected in its place."""
    n = len(like) if like.ndim else 1
    values = np.array(like, dtype="f8") if like.dtype.kind in "biuf" else np.zeros(like.shape)
    flat = values.reshape(-1)
    if len(flat):
        spot = rng.integers(len(flat))
        flat[spot] = (np.nan, np.inf, -np.inf, 1e300, -1e300, 1e-300)[rng.integers(6)]
    choices: list[np.ndarray] = [
        np.float64(3.0) * np.ones(()),
        np.zeros((0, 4)),
        np.zeros((n, 0)),
        np.zeros(n),
        np.zeros((2, n, 4)),
        np.array(like)[: n // 2],
        np.concatenate([like, like]) if like.ndim else like,
        values,
        like.astype("S5"),
        like.astype("U5"),
        np.zeros(like.shape, dtype="c16"),
        np.zeros(like.shape, dtype="M8[s]"),
        np.zeros(like.shape, dtype=[("a", "f4"), ("b", "i4")]),
        np.zeros(like.shape, dtype="V8"),
        np.zeros(like.shape, dtype=bool),
        np.zeros(like.shape, dtype=np.longdouble),
        np.full(like.shape, 2**62, dtype="i8"),
        np.full(like.shape, 2**64 - 1, dtype="u8"),
        np.zeros(like.shape, dtype=like.dtype.newbyteorder()),
        np.asfortranarray(like),
    ]
    return choices[rng.integers(len(choices))]


NPY_HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (6, 4",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 400 + ", 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4), }",
    "{'descr': '<U0', 'fortran_order': False, 'shape': (1099511627776,), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (6, 4), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (6, 4), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (6, 4), }",
    "{'descr': '<f4', 'fortran_order': True, 'shape': (6, 4), }",
    "{'descr': '<f4', 'shape': (6, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (6L, 4L), }",
    "(" * 9000,
    "'''",
    "1 +",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (6, 4), 'more': 1}",
    "\x00" * 50,
    "{}",
    "__import__('os')",
)


def npy_header(data: bytes, rng: Rng) -> bytes:
    """The header of an array in other words."""
    text = NPY_HEADERS[rng.integers(len(NPY_HEADERS))].encode() + b"\n"
    version = (1, 1, 1, 2, 3, 9)[rng.integers(6)]
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data[128:]


def npy(path: Path, rng: Rng) -> None:
    """An array replaced, or its header."""
    if rng.random() < 0.4:
        path.write_bytes(npy_header(path.read_bytes(), rng))
    elif rng.random() < 0.1:
        np.savez(path.with_suffix(".npz"), np.load(path))
        path.with_suffix(".npz").replace(path)
    else:
        np.save(path, odd_array(rng, np.load(path)), allow_pickle=False)


def npz(path: Path, rng: Rng) -> None:
    """A member replaced, gone, double, packed oddly, or with another header."""
    with np.load(path) as found:
        arrays = dict(found)
    name = list(arrays)[rng.integers(len(arrays))]
    kind = rng.integers(6)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[name] = odd_array(rng, arrays[name])
    members = {f"{k}.npy": _npy_bytes(v) for k, v in arrays.items()}
    if kind == 2:
        members[f"{name}.npy"] = npy_header(members[f"{name}.npy"], rng)
    elif kind == 3:
        members[f"{name}.npy"] = BYTES[rng.integers(len(BYTES))](members[f"{name}.npy"], rng)
    packing = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    with zipfile.ZipFile(path, "w", packing[rng.integers(4)]) as file:
        for member, data in members.items():
            file.writestr(member, data)
    if kind == 4:
        _zip_flags(path, rng)
    elif kind == 5:
        some_bytes(path, rng)


def _npy_bytes(array: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.save(held, array, allow_pickle=False)
    return held.getvalue()


def _zip_flags(path: Path, rng: Rng) -> None:
    """Encryption, packing or version of a member as nobody can read it."""
    data = bytearray(path.read_bytes())
    starts = [k for k in range(len(data) - 4) if data[k : k + 4] in (b"PK\x01\x02", b"PK\x03\x04")]
    offset, value = ((8, 1), (10, 99), (6, 99), (8, 0x20), (10, 8))[rng.integers(5)]
    for start in starts:
        shift = offset if data[start + 2] == 1 else offset - 2
        if start + shift < len(data) and rng.random() < 0.7:
            data[start + shift] = value
    path.write_bytes(bytes(data))


# ------------------------------------------------------------------ HDF5

ATTRIBUTES: tuple[Any, ...] = (
    np.nan, np.inf, -5, 0, 1e300, 1e-300, 2**63 - 1, "None", "", "x" * 100, b"\xff\xfe",
    np.zeros(0), np.zeros((3, 3)), [256, 512], ["a", "b"], True, np.float16(1), 1j, "nan",
    h5py.Empty("f4"), h5py.Empty("S3"), np.array([("a", 1)], dtype=[("n", "S3"), ("v", "i4")]),
    "9" * 400, [np.nan, np.inf], [[256.0], [512.0]], -1e300, [0.5, 0.25],
)  # fmt: skip


def h5(path: Path, rng: Rng) -> None:
    """Objects, types, shapes and attributes of an HDF5 file as nobody expects them."""
    with h5py.File(path, "r+") as file:
        for _ in range(1 + int(rng.random() < 0.3)):
            OBJECTS[rng.integers(len(OBJECTS))](file, rng)
    if rng.random() < 0.1:
        some_bytes(path, rng)


def _name(file: h5py.File, rng: Rng) -> str:
    names = sorted(file)
    return names[rng.integers(len(names))] if names else "features"


def _attribute(file: h5py.File, rng: Rng) -> None:
    places = [file, *(file[k] for k in file if isinstance(file.get(k), h5py.Dataset))]
    place = places[rng.integers(len(places))]
    usual = ("patch_size_level0", "patch_size", "overlap", "downsample", "level0_magnification",
             "target_magnification", "encoder", "unit", "tile_size_um", "feat_type", "extractor",
             "patch_level", "name", "mpp")  # fmt: skip
    name = usual[rng.integers(len(usual))]
    if name in place.attrs and rng.random() < 0.2:
        del place.attrs[name]
        return
    place.attrs[name] = ATTRIBUTES[rng.integers(len(ATTRIBUTES))]


def _gone(file: h5py.File, rng: Rng) -> None:
    if len(file):
        del file[_name(file, rng)]


def _group(file: h5py.File, rng: Rng) -> None:
    name = _name(file, rng)
    if name in file:
        del file[name]
    file.create_group(name)["inside"] = np.zeros(3)


def _null(file: h5py.File, rng: Rng) -> None:
    name = _name(file, rng)
    if name in file:
        del file[name]
    file[name] = h5py.Empty(("f4", "i8", "S5")[rng.integers(3)])


def _link(file: h5py.File, rng: Rng) -> None:
    name = _name(file, rng)
    if name in file:
        del file[name]
    links = (
        h5py.SoftLink("/nowhere"),
        h5py.SoftLink(f"/{name}"),
        h5py.ExternalLink("nowhere.h5", "/x"),
        h5py.ExternalLink("/dev/zero", "/x"),
    )
    file[name] = links[rng.integers(len(links))]


def _other_array(file: h5py.File, rng: Rng) -> None:
    name = _name(file, rng)
    old = file.get(name)
    if not isinstance(old, h5py.Dataset) or old.shape is None or old.size > 10**4:
        return
    values, attrs = odd_array(rng, old[()]), dict(old.attrs)
    if values.dtype.kind in "MU":
        values = np.full(values.shape, "x", dtype=h5py.string_dtype())
    del file[name]
    file.create_dataset(name, data=values).attrs.update(attrs)


def _claimed(file: h5py.File, rng: Rng) -> None:
    """Rows that are claimed and not there."""
    name = _name(file, rng)
    old = file.get(name)
    if not isinstance(old, h5py.Dataset) or not old.shape:
        return
    attrs, dtype, rest = dict(old.attrs), old.dtype, old.shape[1:]
    rows = (7, 10**6, 2**40, 2**62)[rng.integers(4)]
    del file[name]
    packed = {"compression": "gzip"} if rng.random() < 0.5 else {}
    new = file.create_dataset(
        name, (6, *rest), dtype, chunks=(2, *(max(1, k) for k in rest)), maxshape=(None, *rest),
        **packed,
    )  # fmt: skip
    new[:2] = 1
    if rng.random() < 0.3:
        new[:] = rng.normal(size=new.shape)
    try:
        new.resize(rows, axis=0)
    except (ValueError, OSError):  # more than HDF5 can count
        new.resize(10**6, axis=0)
    new.attrs.update(attrs)


def _deep(file: h5py.File, rng: Rng) -> None:
    file.require_group("a/" * 50)


OBJECTS = (
    _attribute, _attribute, _attribute, _gone, _group, _null, _link, _other_array, _other_array,
    _claimed, _deep,
)  # fmt: skip

# ------------------------------------------------------------------ torch


def tensor(path: Path, rng: Rng) -> None:
    """A tensor of a kind that holds no features."""
    import torch

    plain = torch.load(path, weights_only=True)
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: plain.to("meta"),
        lambda: plain.to_sparse(),
        lambda: plain.to_sparse_csr(),
        lambda: torch.nested.nested_tensor([plain, plain[:2]]),
        lambda: torch.complex(plain.float(), plain.float()).conj(),
        lambda: torch.complex(plain.float(), plain.float()).conj().imag,
        lambda: plain.to(torch.float8_e4m3fn),
        lambda: torch.quantize_per_tensor(plain.float(), 0.1, 0, torch.qint8),
        lambda: plain > 0,
        lambda: plain.to(torch.bfloat16),
        lambda: plain.to(torch.uint16),
        lambda: plain[:1].expand(6, 4),
        lambda: torch.zeros(1, 4).expand(2**40, 4),
        lambda: plain[::2],
        lambda: plain.T,
        lambda: plain[0],
        lambda: torch.tensor(3.0),
        lambda: plain[:0],
        lambda: plain[None],
        lambda: torch.nn.Parameter(plain.float()),
        lambda: {"features": plain},
        lambda: [plain],
        lambda: plain.numpy(),
        lambda: None,
        lambda: torch.full_like(plain, float("nan")),
        lambda: plain.double() * 1e300,
    )
    legacy = rng.random() < 0.2
    made = kinds[rng.integers(len(kinds))]()
    try:
        torch.save(made, path, _use_new_zipfile_serialization=not legacy)
    except Exception:  # what cannot be written cannot be met
        torch.save(plain, path, _use_new_zipfile_serialization=not legacy)
    if rng.random() < 0.2:
        some_bytes(path, rng)
