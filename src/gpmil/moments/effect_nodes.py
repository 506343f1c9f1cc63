"""Which values of the slide effect the sums of slide_effect.py go over: a part of a lattice.

The lattice s = k h is as fine as a bag needs; the part that counts lies around the mode of the
integrand N(s; 0, tau^2) z(s).
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from gpmil.moments.given_effect import Given, Patches, all_below
from gpmil.moments.truncated import segment_max

STEP = 1.0  # in widths of the narrowest part of the integrand
LEVELS = 4  # steps are powers of 2^(1/4), so that they rarely change with mu
DROP = 18.0  # terms below e^-18 of the largest are left out
SEARCH = 40  # steps at most to the mode
ONE = -6.0  # t of all patches below which q is one: 1 - Phi(-6) = 1e-9
SMOOTH = 0.4  # h / tau up to which a sum over the lattice is an integral and its corrections
TOGETHER = 4  # numbers of nodes are rounded up to multiples of it
FEW = 2**12  # patches up to which nodes go side by side on a CPU: more leave its cache
FEW_ON_GPU = 2**21  # the same where launching a step costs more than the step
# all that fast/effect.py must know to choose the same nodes
RULE = (STEP, LEVELS, DROP, ONE, SMOOTH, SEARCH, TOGETHER)

At = Callable[[Patches, Tensor], Given]


@runtime_checkable
class Bent(Protocol):
    """Of bags at one s each: log z(s), and its first two derivatives in s."""

    @property
    def log_z(self) -> Tensor:
        """Concave in s."""

    @property
    def slope(self) -> Tensor:
        """d log z / ds."""

    @property
    def bend(self) -> Tensor:
        """d2 log z / ds2."""


Slopes = Callable[[Patches, Tensor], Bent]


class Nodes(NamedTuple):
    """s = (first + j) step for j < many in every bag; and where its integrand is largest."""

    first: Tensor
    many: Tensor
    step: Tensor
    mode: Tensor
    width: Tensor
    top: Tensor  # log of the integrand there, or nearby
    certain: Tensor  # whether z = 1 at all s before the first


def find(patches: Patches, tau: Tensor, given: Slopes) -> Nodes:
    """The part of the lattice that counts, around the mode of the integrand."""
    mode, width, at = find_mode(patches, tau, given)
    top = at.log_z - (mode / tau).square() / 2
    reach = math.sqrt(2 * DROP)
    start, end = mode - tau * reach, mode + tau * reach
    least = -segment_max(-patches.sigma, patches.offsets)
    # a product of n tails falls from one to zero within sigma / (1 + .43 log n) at least
    narrow = least / (1 + 0.43 * patches.offsets.diff().log())
    sure = torch.full_like(mode, -math.inf)
    if given is all_below:
        # log q is concave and bends the more the larger s: the integrand falls off faster than
        # N(mode, width^2) on the right, than N(mode, tau^2) on the left
        end = mode + width * reach
        narrow = torch.maximum(narrow, torch.minimum(_fall(patches, mode, end, at), least))
        # every t < ONE before
        sure = -segment_max(patches.mu - ONE * patches.sigma, patches.offsets)
    finest = torch.minimum(width, (tau**-2 + narrow**-2).rsqrt())
    step = torch.exp2(torch.floor(LEVELS * torch.log2(STEP * finest)) / LEVELS)
    certain = (sure > start) & (step < SMOOTH * tau)
    first = torch.ceil(torch.where(certain, torch.minimum(sure, mode), start) / step)
    count = torch.floor(end / step) - first + 1
    return Nodes(first, count, step, mode, width, top, certain)


def _fall(patches: Patches, mode: Tensor, end: Tensor, at: Bent) -> Tensor:
    """Within which distance q falls from one to zero: q' / q'' about where log q = -1.

    That place is found as if -log q were exponential from the mode on.
    """
    slope = at.slope.abs().clamp(min=1e-300)
    further = slope / at.bend.abs().clamp(min=1e-300) * -torch.log(-at.log_z.clamp(max=-1e-300))
    there = all_below(patches, torch.minimum(mode + further.clamp(min=0.0), end))
    return 0.75 * there.slope.abs() / there.bend.abs().clamp(min=1e-300)


def find_mode(patches: Patches, tau: Tensor, given: Slopes) -> tuple[Tensor, Tensor, Bent]:
    """Where log N(s; 0, tau^2) + log z(s) is largest, its width there, and the bags there.

    There s = tau^2 d log z / ds. The right side falls with s, so that |s| lies between zero and
    what it is at zero. Newton's steps on the logarithms of both sides, as the right side may be
    all but exponential; a tenth of the width is near enough.
    """
    at = given(patches, patches.mu.new_zeros(len(patches.offsets) - 1))
    sign, high = at.slope.sign(), tau.square() * at.slope.abs()
    low, size = torch.zeros_like(high), high / (1 - tau.square() * at.bend.clamp(max=0))
    for _ in range(SEARCH):
        at = given(patches, sign * size)
        slope = (sign * at.slope).clamp(min=1e-300)  # beyond the mode it may have turned round
        # log(1 - q) of patches with very different sigma bends upwards in places
        width = (tau**-2 - at.bend.clamp(max=0)).rsqrt()
        goal = tau.square() * slope
        low, high = torch.where(goal > size, size, low), torch.where(goal > size, high, size)
        # log goal - log size = 0 in log size
        ratio = (size * at.bend / slope).abs()
        new = size * torch.exp((goal / size.clamp(min=1e-300)).log() / (1 + ratio))
        new = torch.where((new > low) & (new < high), new, (low + high) / 2)
        done = (new - size).abs() < 0.1 * width
        if bool(done.all()):
            break
        size = torch.where(done, size, new)  # a bag's mode does not depend on the others
    return sign * size, width, at


def walk(patches: Patches, nodes: Nodes) -> Iterator[tuple[int, Patches, Nodes, Tensor, Tensor]]:
    """0, 1, ... with the bags that have so many nodes, and where their rows and they are.

    Bags with the same number of nodes but for a few go together: choosing rows has its price. Where
    a step has few numbers to work on, TOGETHER nodes go side by side: as many copies of the bags,
    each one node further than the one before.
    """
    upto = 0
    device = patches.mu.device
    most = torch.ceil(nodes.many / TOGETHER) * TOGETHER
    for last in most.unique().tolist():
        bags = (most >= last).nonzero()[:, 0]
        here = Nodes(*(x[bags] for x in nodes))
        if len(bags) == len(most):
            some, rows = patches, torch.arange(len(patches.mu), device=device)
        else:
            some, rows = patches.some(most >= last)
        copies = TOGETHER if len(rows) <= (FEW if device.type == "cpu" else FEW_ON_GPU) else 1
        if copies > 1:
            some, here = some.repeated(copies), _one_further(here, copies)
        for j in range(upto, int(last), copies):
            yield j, some, here, rows, bags
        upto = int(last)


def _one_further(nodes: Nodes, copies: int) -> Nodes:
    """Copies of the bags' nodes, each beginning one further."""
    again = Nodes(*(x.repeat(copies) for x in nodes))
    step = torch.arange(copies, device=nodes.first.device).repeat_interleave(len(nodes.first))
    return again._replace(first=again.first + step)
