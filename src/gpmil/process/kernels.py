"""The kernels, in one table: a new kernel is one entry of KERNELS (docs/extending.md).

    k(x, z) = variance * value(pairs(x, z), lengthscale),  k(x, x) = variance * value(own(x), ...)

Formulas are plain torch, so that derivatives of any order are right; gpytorch's setters cut
gradients and its second derivatives are wrong. `pairs` does not depend on the settings: learning
them keeps it. A gpytorch kernel object of the user's is taken as it is.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.kernels import Kernel as GPyTorchKernel
from jaxtyping import Bool, Float
from torch import Tensor

from gpmil.fast import compiled, products

TINY = 1e-30  # a squared distance
JITTER = 1e-6  # of the variance, on the diagonal of Kzz
Length = float | Tensor


# --- What a kernel is a function of ---------------------------------------------------------------


def squared_distances(
    x: Float[Tensor, "*b n d"], z: Float[Tensor, "*#b m d"]
) -> Float[Tensor, "*b n m"]:
    """|x - z|^2 between the rows of x and of z."""
    center = z.flatten(0, -2).mean(0)
    x, z = x - center, z - center
    out = x.square().sum(-1, keepdim=True) + z.square().sum(-1)[..., None, :]
    out -= (x @ z.mT).mul_(2)
    return out.clamp_(min=0)


def no_distance(x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
    """|x - x|^2 of every row."""
    return x.new_zeros(x.shape[:-1])


def inner_products(
    x: Float[Tensor, "*b n d"], z: Float[Tensor, "*#b m d"]
) -> Float[Tensor, "*b n m"]:
    """x'z between the rows of x and of z."""
    return x @ z.mT


def squared_norms(x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
    """x'x of every row."""
    return products.dots(x, x)


# --- The kernels ----------------------------------------------------------------------------------


def rbf_value(s: Tensor, length: Length) -> Tensor:
    """exp(-s / (2 length^2)), in place of the product: no second matrix as large as s."""
    return (s * (-0.5 / length**2)).exp_()


def rbf(
    x: Float[Tensor, "*b n d"], z: Float[Tensor, "*#b m d"], variance: Length, length: Length
) -> Float[Tensor, "*b n m"]:
    """variance exp(-|x - z|^2 / (2 length^2)) in place, one pass where the formula takes several.

    On a CPU it is compiled.
    """
    # -|x - z|^2 / 2 = x'z - |x|^2 / 2 - |z|^2 / 2, on centred inputs so that little cancels
    center, same = z.flatten(0, -2).mean(0), x is z
    z = (z - center).div_(length)
    x = z if same else (x - center).div_(length)
    loop = None if x.is_cuda else compiled.pairs()
    if loop is not None:
        return _compiled_rbf(x, z.expand(*x.shape[:-2], *z.shape[-2:]), variance, loop)
    # both squares as a column more of either side: a pass over the matrix less for each
    ones, half = x.new_ones(*x.shape[:-1], 1), -squared_norms(x)[..., None] / 2
    left = torch.cat([x, half, ones], -1)
    right = torch.cat([z, torch.ones_like(z[..., :1]), -squared_norms(z)[..., None] / 2], -1)
    return (left @ right.mT).clamp_(max=0).exp_().mul_(variance)


def _compiled_rbf(
    x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b m d"], variance: Length, loop: Any
) -> Float[Tensor, "*b n m"]:
    """The same at length one, matrix by matrix: of one with itself NumPy computes half."""
    (*many, n, d), m = x.shape, z.shape[-2]
    count = math.prod(many)
    # memory of torch's: its products depend in the last bit on how rows are aligned
    out = torch.empty(count, n, m, dtype=torch.float64)
    pairs = zip(out.numpy(), x.reshape(count, n, d).numpy(), z.reshape(count, m, d).numpy())
    with np.errstate(over="ignore", invalid="ignore"):  # as torch has it; who asks looks at K
        for K, a, b in pairs:
            products.times(a, b.T, K)
            loop.rbf(K, squares(a) / 2, squares(b) / 2, float(variance))
    return out.view(*many, n, m)


def rbf_times(
    x: Float[Tensor, "n d"],
    z: Float[Tensor, "m d"],
    B: Float[Tensor, "m k"],
    triangle: int,
    variance: Length,
    length: Length,
) -> Float[Tensor, "n k"] | None:
    """`Kernel.times`; None where it is not compiled."""
    loop = None if x.is_cuda or products.tiled() is None else compiled.pairs()
    if loop is None:
        return None
    rows, points, right = (a.detach().contiguous().numpy() for a in (x, z, B))
    given = points, _inverse(length, x.shape[1]), float(variance), right, triangle
    out = torch.empty(len(rows), right.shape[1], dtype=torch.float64)  # as above

    def some(which: slice) -> None:
        loop.rbf_times(rows[which], *given, out.numpy()[which])

    products.rows_in_lanes(len(rows), z.numel() + B.numel(), some)
    return out


def _inverse(length: Length, d: int) -> Float[np.ndarray, " d"]:
    """1 / length of every column."""
    given = length.detach() if isinstance(length, Tensor) else length
    return np.broadcast_to(1 / np.asarray(given, float), (d,)).copy()


def squares(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
    """x'x of every row."""
    return np.einsum("ij,ij->i", x, x)


def rbf_against(
    x: Float[Tensor, "n d"], sizes: Sequence[int], S: Float[Tensor, "b p p"], length: Length
) -> float | None:
    """`Kernel.against` at variance one; None where it is not compiled."""
    loop = None if x.is_cuda else compiled.pairs()
    if loop is None:
        return None
    given = x.contiguous().numpy(), _inverse(length, x.shape[1])
    return loop.rbf_against(*given, np.array(sizes), S.detach().numpy())


def rbf_less(
    x: Float[Tensor, "n d"],
    rows: Float[Tensor, "n r1"],
    mask: Bool[Tensor, "b p"],
    variance: Length,
    length: Length,
) -> Float[Tensor, "b p p"] | None:
    """`Kernel.less`; None where it is not compiled."""
    loop = None if x.is_cuda else compiled.pairs()
    if loop is None:
        return None
    out = torch.zeros(*mask.shape, mask.shape[1], dtype=torch.float64)
    inputs = x.contiguous().numpy(), _inverse(length, x.shape[1]), float(variance)
    loop.rbf_less(*inputs, rows.contiguous().numpy(), mask.sum(1).numpy(), out.numpy())
    return out


def _distance(s: Tensor) -> Tensor:
    """sqrt(s), which has no derivative at zero; in place, as a copy costs more than the root."""
    return s.clamp(min=TINY).sqrt_()


def matern32_value(s: Tensor, length: Length) -> Tensor:
    """(1 + r) exp(-r), r = sqrt(3 s) / length."""
    r = _distance(s) * (math.sqrt(3) / length)
    return (1 + r) * r.neg().exp_()


def matern52_value(s: Tensor, length: Length) -> Tensor:
    """(1 + r + r^2 / 3) exp(-r), r = sqrt(5 s) / length."""
    r = _distance(s) * (math.sqrt(5) / length)
    return (1 + r + r.square() / 3) * r.neg().exp_()


def linear_value(g: Tensor, length: Length) -> Tensor:
    """g / length^2."""
    return g / length**2


class Formula(NamedTuple):
    """A kernel of variance one, as a function of what two inputs have to do with each other."""

    pairs: Callable[[Tensor, Tensor], Tensor]  # of the rows of x with those of z
    own: Callable[[Tensor], Tensor]  # the same of every row with itself
    value: Callable[[Tensor, Length], Tensor]  # from either, and the length scale
    # the whole of it from variance and length, where no derivative is asked for
    in_place: Callable[[Tensor, Tensor, Length, Length], Tensor] | None = None
    against: Callable[[Tensor, Sequence[int], Tensor, Length], float | None] | None = None
    less: Callable[[Tensor, Tensor, Tensor, Length, Length], Tensor | None] | None = None
    times: Callable[[Tensor, Tensor, Tensor, int, Length, Length], Tensor | None] | None = None


KERNELS: dict[str, Formula] = {
    "rbf": Formula(
        squared_distances, no_distance, rbf_value, rbf, rbf_against, rbf_less, rbf_times
    ),
    "matern32": Formula(squared_distances, no_distance, matern32_value),
    "matern52": Formula(squared_distances, no_distance, matern52_value),
    "linear": Formula(inner_products, squared_norms, linear_value),
}


def formula_of(kernel: str | GPyTorchKernel, device: str | torch.device = "cpu") -> Formula:
    """The entry of the table, or a kernel object in the form of one."""
    if isinstance(kernel, GPyTorchKernel):
        return _as_given(kernel, device)
    if kernel not in KERNELS:
        raise ValueError(
            f"kernel must be one of {sorted(KERNELS)}, 'auto' or a gpytorch kernel, got {kernel!r}."
        )
    return KERNELS[kernel]


def _as_given(kernel: GPyTorchKernel, device: str | torch.device) -> Formula:
    """A copy of the user's object in float64: its values are the pairs, no length applies."""
    mine = copy.deepcopy(kernel).double().to(device).requires_grad_(False)
    return Formula(
        lambda x, z: mine(x, z).to_dense(),
        lambda x: mine(x[..., None, :], x[..., None, :]).to_dense()[..., 0, 0],
        lambda k, length: k,
    )


class Kernel:
    """A formula with its two settings: dense matrices in float64, and their diagonal.

    Settings are numbers, or tensors to differentiate. They do not apply to a kernel object.
    """

    def __init__(
        self,
        kernel: str | GPyTorchKernel,
        variance: float | Tensor,
        lengthscale: float | Tensor,
        device: str | torch.device = "cpu",
    ):
        self.named = isinstance(kernel, str)
        self.variance = variance if self.named else 1.0
        self.lengthscale = lengthscale if self.named else 1.0
        self.formula = formula_of(kernel, device)

    def __call__(
        self, x: Float[Tensor, "*b n d"], z: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b n m"]:
        """The matrix of covariances between the rows of x and of z."""
        f = self.formula
        if torch.is_grad_enabled() or not self.named:
            return self.variance * f.value(f.pairs(x, z), self.lengthscale)
        if f.in_place is not None:
            return f.in_place(x, z, self.variance, self.lengthscale)
        return f.value(f.pairs(x, z), self.lengthscale).mul_(self.variance)

    def times(
        self,
        x: Float[Tensor, "n d"],
        z: Float[Tensor, "m d"],
        B: Float[Tensor, "m k"],
        triangle: int = 0,
    ) -> Float[Tensor, "n k"]:
        """K B, K the matrix between the rows of x and of z; `triangle` as in products.matmul."""
        at_once = self.formula.times
        if at_once is not None and not torch.is_grad_enabled():
            found = at_once(x, z, B, triangle, self.variance, self.lengthscale)
            if found is not None:
                return found
        return products.matmul(self(x, z), B, triangle)

    def diagonal(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n"]:
        """k(x_i, x_i)."""
        return self.variance * self.formula.value(self.formula.own(x), self.lengthscale)

    def against(
        self, x: Float[Tensor, "n d"], sizes: Sequence[int], S: Float[Tensor, "b p p"]
    ) -> float | Tensor:
        """sum_bij S_bij k(x_i, x_j) over the rows of every bag; S symmetric, padded to one size."""
        found = self.formula.against
        if found is not None and not torch.is_grad_enabled():
            total = found(x, sizes, S, self.lengthscale)
            if total is not None:
                return self.variance * total
        bags = zip(x.split(list(sizes)), S)
        return sum((one[: len(rows), : len(rows)] * self(rows, rows)).sum() for rows, one in bags)

    def less(
        self, x: Float[Tensor, "n d"], rows: Float[Tensor, "n r1"], mask: Bool[Tensor, "b p"]
    ) -> Float[Tensor, "b p p"] | None:
        """k(x_i, x_j) - y_i'y_j over the rows [., y] of every bag, padded; None: not compiled."""
        found = self.formula.less
        if found is None or torch.is_grad_enabled():
            return None
        return found(x, rows, mask, self.variance, self.lengthscale)
