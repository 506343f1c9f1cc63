"""Memory: what can still be had of it, and arrays that are quick to read."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# limit, use, and in memory.stat the pages of files that are given up first: version 2, version 1
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
LINE = 64  # bytes that a processor fetches at once


def in_lines(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """An array for a CPU that begins where a line of memory does.

    From elsewhere every vector lies in two lines: a sweep takes a sixth longer. And NumPy, unlike
    torch, asks for large pages: 31 GB/s are read from them instead of 18 on an AMD machine.
    """
    size = shape[0] * shape[1] * dtype.itemsize
    room = np.empty(size + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return torch.from_numpy(room[start : start + size]).view(dtype).view(shape)


def free_memory(device: torch.device) -> float | None:
    """Bytes that can still be had, where the system says."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        left = float(psutil.virtual_memory().available)
    except OSError:  # a sandbox without /proc
        return None
    return min([left, *left_in_cgroups(CGROUPS, OWN_CGROUP)])


def left_in_cgroups(mounted: Path, own: Path) -> Iterator[float]:
    """Bytes left under every limit of our control group and of those around it.

    Inside a container `own` may name a path of the host that does not exist here; the limit is
    then in the root, which is around every path.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = mounted, V2
        elif "memory" in controllers.split(","):
            folder, names = mounted / "memory", V1
        else:
            continue
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            yield from _left(folder / group, *names)


def _left(group: Path, limit: str, used: str, cache: str) -> Iterator[float]:
    """Limit less use, where both are numbers; a group without a limit says "max"."""
    try:
        most, now = (int((group / name).read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    yield float(max(0, most - now + int(stat.get(cache, 0))))
