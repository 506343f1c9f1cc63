"""How fast this machine reads memory: nothing that must read H once can be quicker."""

from dataclasses import dataclass
from functools import partial

import torch

from bench import machine, measure

GB = 10**9
LARGE = {"cpu": 2**30, "cuda": 4 * 2**30}  # bytes, well beyond any cache
BEST_OF = 5
_MEASURED: dict[tuple[str, int, int | None], "Bandwidth"] = {}


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second at which an array of `array_bytes` was read, the best of several reads."""

    bytes_per_second: float
    array_bytes: int
    device: str
    threads: int

    def seconds(self, n_bytes: float) -> float:
        """The least time in which so many bytes can be read."""
        return n_bytes / self.bytes_per_second


def read(device: str, threads: int, array_bytes: int | None = None) -> Bandwidth:
    """The best of float32 sums, dot and matrix-vector products; measured once per process."""
    key = device, threads, array_bytes
    if key not in _MEASURED:
        _MEASURED[key] = _read(device, threads, array_bytes or _affordable(device))
    return _MEASURED[key]


def measured() -> list[Bandwidth]:
    """What was measured so far in this process."""
    return list(_MEASURED.values())


def _read(device: str, threads: int, array_bytes: int) -> Bandwidth:
    n = array_bytes // 4
    with measure.threads(threads):
        x = torch.ones(n, device=device)
        runs = [partial(reader, x) for reader in READERS for _ in range(BEST_OF)]
        best = min(measure.once(run) for run in runs)
    return Bandwidth(4 * n / best, 4 * n, device, threads)


READERS = (
    lambda x: x.sum(),
    lambda x: torch.dot(x, x),
    lambda x: x[: len(x) // 256 * 256].view(-1, 256) @ x[:256],
)


def _affordable(device: str) -> int:
    """The size to read, but at most a quarter of the memory that there is."""
    there = torch.cuda.mem_get_info()[0] if device == "cuda" else machine.memory()
    return min(LARGE[device], there // 4) if there else LARGE[device]
