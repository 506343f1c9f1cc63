"""A pass over the bags in one kernel, for GPUs: log Z, its gradient and its Hessian.

The plain pass reads H twice in float64, which it is turned into before, and some thirty vectors in
between. In the kernel (fused_kernel.py) a program works on one bag at a time: its rows of H are
still in the cache when they are needed again, and everything else stays inside. Bags come largest
first, so that no program ends long after the others. On a GPU from Hopper on, ring.py does the same
in less time.

Everything here returns None where it does not apply: no Triton (it comes with torch's CUDA builds),
numbers that leave the range of the kernel.
"""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpmil.fast import ring

# Measured on an H200 at a million instances and 200 columns, where these were the fastest.
ROWS = 8  # of H in registers at a time
WARPS = 1
PROGRAMS = 32  # per multiprocessor
MANY_ROWS = 2**17  # over which roundings to eleven bits add up to nothing: their errors differ


@functools.cache
def available() -> bool:
    """Whether Triton is there."""
    return importlib.util.find_spec("triton") is not None


def programs(bags: int, device: torch.device) -> int:
    """How many work side by side."""
    here = torch.cuda.get_device_properties(device).multi_processor_count
    return min(PROGRAMS * here, bags)


def power_of_two(n: int) -> int:
    """The next one."""
    return 1 << (n - 1).bit_length()


def times(H: Float[Tensor, "n M"], w: Float[Tensor, " M"]) -> Float[Tensor, " n"]:
    """H w in float64; from float32 on a GPU without a copy of H in between."""
    if not _converts(H):
        return H.double() @ w
    from gpmil.fast import fused_kernel

    n, M = H.shape
    out, G = w.new_empty(n), programs(n, H.device)
    fused_kernel.times[(G,)](H, w, out, n, M, power_of_two(M), ROWS, num_warps=WARPS)
    return out


def against(H: Float[Tensor, "n M"], x: Float[Tensor, " n"]) -> Float[Tensor, " M"]:
    """H'x in float64, likewise."""
    if not _converts(H):
        return H.double().mT @ x
    from gpmil.fast import fused_kernel

    (n, M), G = H.shape, programs(len(x), H.device)
    out = x.new_empty(G, M)
    fused_kernel.against[(G,)](H, x.contiguous(), out, n, M, power_of_two(M), ROWS, num_warps=WARPS)
    return out.sum(0)


def _converts(H: Float[Tensor, "n M"]) -> bool:
    return H.is_cuda and H.dtype == torch.float32 and H.is_contiguous() and available()


@contextmanager
def short_products() -> Iterator[None]:
    """Factors in float32 are rounded to eleven bits, for which a GPU has units of their own.

    torch has one switch for the process; it is on for as long as a product is asked for.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Pass:
    """Some bags on a GPU, and what one pass at w leaves of them."""

    def __init__(
        self, H: Float[Tensor, "n M"], sigma: Float[Tensor, " n"], offsets: Int[Tensor, " b1"],
        positive: Bool[Tensor, " b"], largest_first: Int[Tensor, " b"],
    ):  # fmt: skip
        self.H, self.bags = H, (sigma, offsets, positive.to(torch.int8), largest_first)

    def rise(self, w: Float[Tensor, " M"], c: float) -> tuple[float, Tensor] | None:
        """sum_b log Z_b and its gradient in w."""
        found = self._run(w, c)
        return None if found is None else found[:2]

    def bound(self, w: Float[Tensor, " M"], c: float) -> tuple[float, Tensor, Tensor] | None:
        """sum_b log Z_b, its gradient in w, and minus its Hessian, multiplied in H's dtype."""
        found = self._run(w, c)
        if found is None:
            return None
        value, gradient, diagonal, per_bag = found
        # H'A H = H'diag(d) H + sum_b (H_b'pull_b)(H_b'pull_b)'
        weighted = diagonal.to(self.H.dtype)[:, None] * self.H
        with short_products() if len(self.H) >= MANY_ROWS else nullcontext():
            middle = self.H.mT @ weighted
        return value, gradient, middle.double() + per_bag.mT @ per_bag

    def _run(self, w: Tensor, c: float) -> tuple[float, Tensor, Tensor, Tensor] | None:
        """log Z, its gradient, d, and H_b'pull_b of every bag."""
        from gpmil.fast import fused_kernel

        (sigma, offsets, positive, order), M = self.bags, self.H.shape[1]
        bags, kernel = len(order), ring.serves(self.H, "rise")
        G = programs(bags, self.H.device) if kernel is None else kernel.parts(bags)
        partial, log_z, per_bag = (sigma.new_empty(s) for s in ((G, M), (G,), (bags, M)))
        mean, weight, diagonal = sigma.new_empty(3, len(sigma))
        given = (
            self.H, sigma, w, offsets, positive, order, mean, weight, partial, log_z, diagonal,
            per_bag, sigma.new_full((1,), c), bags,
        )  # fmt: skip
        if kernel is None:
            fused_kernel.rise[(G,)](*given, M, power_of_two(M), ROWS, 32 * WARPS, num_warps=WARPS)
        else:
            kernel.launch(bags, *given)
        gradient, total = partial.sum(0), log_z.sum()
        fine = (torch.isfinite(gradient).all() & torch.isfinite(total)).to(total.dtype)
        value, in_range = torch.stack([total, fine]).tolist()  # the one time that it is waited for
        return (value, gradient, diagonal, per_bag) if in_range else None
