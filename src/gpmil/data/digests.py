"""A number per bag that tells its features from any others: how runs and models know them again."""

import hashlib

import numpy as np
from jaxtyping import Num


class FeatureDigest:
    """The digest of one bag's features, which come block by block, as they are stored."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, rows: Num[np.ndarray, "n d"]) -> None:
        """The next rows."""
        self._hash.update(np.ascontiguousarray(rows).data)

    @property
    def number(self) -> int:
        """Of 64 bits, to be kept in an array."""
        return int.from_bytes(self._hash.digest(), "little", signed=True)


def digest(rows: Num[np.ndarray, "n d"]) -> int:
    """The number of a bag whose features lie in one piece."""
    found = FeatureDigest()
    found.add(rows)
    return found.number
