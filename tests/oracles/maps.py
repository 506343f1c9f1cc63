"""Slow versions of what heat maps compute, by loops."""

import numpy as np


def area_mean(
    corners: np.ndarray, sides: np.ndarray, values: np.ndarray, shape: tuple[int, int]
) -> np.ndarray:
    """Mean of values on each pixel of a canvas (width, height), weighted by area covered.

    corners (n, 2) and sides (2,) are in pixels; NaN values are left out.
    """
    width, height = shape
    image = np.full((height, width), np.nan)
    for row in range(height):
        for column in range(width):
            total = area = 0.0
            for (x, y), value in zip(corners, values):
                wide = min(x + sides[0], column + 1) - max(x, column)
                high = min(y + sides[1], row + 1) - max(y, row)
                if wide > 1e-6 and high > 1e-6 and np.isfinite(value):
                    total += wide * high * value
                    area += wide * high
            if area:
                image[row, column] = total / area
    return image


def block_mean(image: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """An image (h, w, 3) shrunk to (width, height) by averaging whole blocks."""
    width, height = shape
    high, wide = image.shape[0] // height, image.shape[1] // width
    out = np.zeros((height, width, 3))
    for row in range(height):
        for column in range(width):
            block = image[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
            out[row, column] = block.reshape(-1, 3).mean(axis=0)
    return out
