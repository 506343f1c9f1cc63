"""Products by the routine that is the fastest for them.

On a CPU that is tiles.py, where Numba can be used; else BLAS, which can compute half of a result
that is symmetric: torch has no door to that, NumPy takes it where a matrix meets its own
transpose. On a GPU the plain product is taken. In float32 oneDNN makes use of the whole width of a
processor's vectors, whoever made it: half the time of MKL on AMD.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gpmil.fast.lanes import LANES, in_lanes

ROWS = 1024  # weighted at a time: they are still in the cache when they are multiplied
SIDE_BY_SIDE = 2**26  # multiplications from which threads pay


def matmul(
    A: Float[Tensor, "n k"], B: Float[Tensor, "k m"], triangle: int = 0
) -> Float[Tensor, "n m"]:
    """A B; `triangle`: 1 where B is zero below its diagonal, -1 above, 0 where nowhere."""
    if _plain(A) or B.requires_grad:
        return A @ B
    out = A.new_empty(len(A), B.shape[1])  # torch's memory, aligned: see Factor.inverted
    times(A.numpy(), B.numpy(), out.numpy(), triangle)
    return out


def times(
    A: Float[np.ndarray, "n k"],
    B: Float[np.ndarray, "k m"],
    out: Float[np.ndarray, "n m"] | None = None,
    triangle: int = 0,
) -> Float[np.ndarray, "n m"]:
    """The same of arrays."""
    out = np.empty((len(A), B.shape[1]), A.dtype) if out is None else out
    loops = tiled()
    if loops is None:
        return np.matmul(A, B, out=out)
    A, B = np.ascontiguousarray(A), np.ascontiguousarray(B)
    rows_in_lanes(len(A), B.size, lambda rows: loops.times(A[rows], B, out[rows], triangle))
    return out


def rows_in_lanes(n: int, of_each: int, work: Callable[[slice], None]) -> None:
    """`work` on n rows, of so many multiplications each; in threads where that pays."""
    if n * of_each < SIDE_BY_SIDE:
        work(slice(0, n))
        return
    many = n // LANES + 1

    def one_lane(starts: Sequence[int]) -> None:
        for start in starts:
            work(slice(start, start + many))

    in_lanes(range(0, n, many), one_lane, lambda *_: None)


def gram(X: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
    """X'X."""
    if _plain(X):
        return X.mT @ X
    if tiled() is not None:
        return half_gram(X, X)
    rows = X.numpy()
    return torch.from_numpy(rows.T @ rows)


def half_gram(X: Float[Tensor, "n M"], Y: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
    """X'Y on and below its diagonal, and above as below: all of it where it is symmetric."""
    loops = None if _plain(X) or _plain(Y) else tiled()
    if loops is None:
        found = X.mT @ Y
        return found.tril() + found.tril(-1).mT
    x, y = (a.contiguous().numpy() for a in (X, Y))
    return torch.from_numpy(_by_tiles(x, y, np.ones(len(x), x.dtype), loops)).to(X.dtype)


def weighted_gram(
    H: Float[Tensor, "n M"], weights: Float[Tensor, " n"]
) -> Float[Tensor, "M M"]:  # fmt: skip
    """H'diag(weights) H, multiplied in the dtype of H, added up in float64."""
    if _plain(H) or (weights.requires_grad and torch.is_grad_enabled()):
        return (H.mT @ (weights[:, None] * H)).double()
    weights, loops = weights.detach(), tiled()
    if loops is not None:
        h = H.numpy()
        return torch.from_numpy(_by_tiles(h, h, weights.contiguous().numpy(), loops))
    return _by_halves(H, weights)


def _by_tiles(
    X: Float[np.ndarray, "n M"],
    Y: Float[np.ndarray, "n M"],
    weights: Float[np.ndarray, " n"],
    loops: Any,
) -> Float[np.ndarray, "M M"]:
    total = np.zeros((X.shape[1], X.shape[1]))
    loops.half_gram(np.ascontiguousarray(X), np.ascontiguousarray(Y), weights, total)
    return total


def _by_halves(H: Float[Tensor, "n M"], weights: Float[Tensor, " n"]) -> Float[Tensor, "M M"]:
    h, root = H.numpy(), weights.abs().sqrt_().numpy()
    total = np.zeros((h.shape[1], h.shape[1]))
    # H'diag(a) H - H'diag(b) H, a the weights above zero and -b those below
    for some, add in ((weights > 0, np.add), (weights < 0, np.subtract)):
        chosen = some.numpy().nonzero()[0]
        for start in range(0, len(chosen), ROWS):
            rows = chosen[start : start + ROWS]
            x = h[rows]
            x *= root[rows, None]
            add(total, x.T @ x, out=total)
    return torch.from_numpy(total)


def dots(A: Float[Tensor, "*b k"], B: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """a'b of every row of A with that of B; on a CPU NumPy takes a third of torch's time."""
    if _plain(A) or _plain(B):
        return torch.linalg.vecdot(A, B)
    return torch.from_numpy(np.asarray(np.vecdot(A.numpy(), B.numpy())))


def affine(
    x: Float[Tensor, "n d"], z: Float[Tensor, "k d"], bias: Float[Tensor, " k"]
) -> Float[Tensor, "n k"]:
    """x z' + bias."""
    found = torch.nn.functional.linear(*(ready(a) for a in (x, z, bias)))
    return found.to_dense() if found.is_mkldnn else found


def ready(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """As `affine` takes it: in float32 on a CPU a copy for oneDNN, which may be used again."""
    plain = x.is_cuda or x.is_mkldnn or x.dtype != torch.float32
    return x if plain or not torch.backends.mkldnn.is_available() else x.to_mkldnn()


def _plain(X: Tensor) -> bool:
    return X.is_cuda or X.requires_grad


@functools.cache
def tiled() -> Any:
    """The module of tiles; None without Numba, or where they are no gain."""
    try:
        from gpmil.fast import tiles
    except (ImportError, RuntimeError):  # RuntimeError: no place for its cache
        return None
    return tiles if tiles.GAIN else None
