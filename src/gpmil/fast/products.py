"""Products by the routine that is the fastest for them.

Where the result is symmetric BLAS can compute half of it. torch has no door to that; NumPy takes it
where a matrix meets its own transpose. On a CPU that takes six tenths of the time of a plain
product, on a GPU the plain one is taken. In float32 oneDNN makes use of the whole width of a
processor's vectors, whoever made it: half the time of MKL on AMD.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

ROWS = 1024  # weighted at a time: they are still in the cache when they are multiplied


def gram(X: Float[Tensor, "n M"]) -> Float[Tensor, "M M"]:
    """X'X."""
    if _plain(X):
        return X.mT @ X
    rows = X.numpy()
    return torch.from_numpy(rows.T @ rows)


def weighted_gram(
    H: Float[Tensor, "n M"], weights: Float[Tensor, " n"]
) -> Float[Tensor, "M M"]:  # fmt: skip
    """H'diag(weights) H, multiplied in the dtype of H, added up in float64."""
    if _plain(H) or (weights.requires_grad and torch.is_grad_enabled()):
        return (H.mT @ (weights[:, None] * H)).double()
    weights = weights.detach()
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
