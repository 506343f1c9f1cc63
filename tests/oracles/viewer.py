"""Slow versions of what the viewer computes, and its binary map read byte by byte."""

import json
import math
import struct

import numpy as np

SIZES = {"float64": "d", "uint16": "H", "uint32": "I", "uint8": "B", "int8": "b"}


def decode(body: bytes) -> tuple[dict, dict[str, list]]:
    """Header and arrays of a map, as the format says, with nothing but `struct`."""
    assert body[:4] == b"GPM1"
    (length,) = struct.unpack_from("<I", body, 4)
    header = json.loads(body[8 : 8 + length])
    at = 8 + length
    assert at % 8 == 0
    arrays = {}
    for array in header["arrays"]:
        code = SIZES[array["dtype"]]
        assert at % struct.calcsize(code) == 0, "a browser cannot use this array in place"
        arrays[array["name"]] = list(struct.unpack_from(f"<{header['n']}{code}", body, at))
        at += header["n"] * struct.calcsize(code)
    assert at == len(body)
    return header, arrays


def nearest(z: np.ndarray, row: int, allowed: list[int], count: int) -> list[tuple[int, float]]:
    """The rows nearest to one, by loops over all rows and columns."""
    found = []
    for i in allowed:
        if i != row:
            found.append((math.sqrt(sum((a - b) ** 2 for a, b in zip(z[i], z[row]))), i))
    return [(i, d) for d, i in sorted(found)[:count]]


def deep_zoom_tile(image: np.ndarray, level: int, last: int, column: int, row: int) -> tuple:
    """Width and height of a Deep Zoom tile of 254 pixels with an overlap of 1."""
    sides = []
    for length, k in zip((image.shape[1], image.shape[0]), (column, row)):
        for _ in range(last - level):
            length = (length + 1) // 2
        pixels = [p for p in range(length) if k * 254 - 1 <= p < (k + 1) * 254 + 1]
        sides.append(len(pixels))
    return tuple(sides)


def roc_points(labels: list[int], p: list[float]) -> set[tuple[float, float]]:
    """False and true positive rate at every threshold."""
    positive, negative = sum(labels), len(labels) - sum(labels)
    points = {(0.0, 0.0)}
    for threshold in p:
        called = [y for y, v in zip(labels, p) if v >= threshold]
        points.add(((len(called) - sum(called)) / negative, sum(called) / positive))
    return points
