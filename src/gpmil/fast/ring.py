"""Passes over the bags on GPUs from Hopper on (ring_kernel.cu): rows of H come from memory once.

Triton's kernels (fused_kernel.py) read a bag's rows twice, and wait for them each time; here they
are sent for ahead and kept until they were multiplied twice, which Triton cannot say. The source is
compiled by NVRTC for the number of columns at hand, half a second once per process; both, and the
package that asks for them (cuda-bindings), come with torch's CUDA builds.

`serves` says where all of that is there; elsewhere Triton's kernels do the same.
"""

import ctypes
import functools
import importlib.util
import logging
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

logger = logging.getLogger("gpmil")

# Measured on an H200 at a million instances and 200 columns, where these were the fastest.
THREADS, TEAMS = 256, 2
SLOTS = 32  # as in the kernel
CELLS, SLOT = 16, 32  # bytes beside a row of the ring, and of a bag's slot
FEWEST_ROWS = 64  # of the ring: with fewer most bags would not fit
HOPPER = (9, 0)


class Kernel(NamedTuple):
    """A compiled function, the shared memory it asks for, and how many of it work side by side."""

    function: Any
    shared: int
    side_by_side: int  # one per multiprocessor, whose shared memory is the ring

    def parts(self, bags: int) -> int:
        """How many sums over some of the bags it leaves."""
        return TEAMS * min(self.side_by_side, bags)

    def launch(self, bags: int, *arguments: Tensor | int) -> None:
        """On the current stream: tensors by their places, whole numbers as they are."""
        from cuda.bindings import driver

        values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        types = [ctypes.c_void_p if isinstance(x, Tensor) else ctypes.c_int for x in arguments]
        grid = min(self.side_by_side, bags), 1, 1
        block = TEAMS * THREADS + 32, 1, 1  # and the warp that sends for rows
        stream = torch.cuda.current_stream().cuda_stream
        given = tuple(values), tuple(types)
        _checked(driver.cuLaunchKernel(self.function, *grid, *block, self.shared, stream, given, 0))


def serves(H: Float[Tensor, "n M"], name: str, near: int = 1) -> Kernel | None:
    """The kernel `name` for these rows (and so many neighbours); None where it does not apply."""
    M = H.shape[1]
    fits = H.is_cuda and H.dtype == torch.float32 and H.is_contiguous() and M % 4 == 0
    if not fits or M // 4 > THREADS or len(H) >= 2**31 or H.data_ptr() % 16:
        return None
    if H.device.index != torch.cuda.current_device():  # whose context it would be compiled for
        return None
    return _compiled(name, M, near, H.device)


def rows_of_ring(M: int, memory: int) -> int:
    """How many rows of M columns fit, with what lies beside them.

    >>> rows_of_ring(200, 232448)
    263
    """
    groups, warps = THREADS // (M // 4), THREADS // 32
    of_teams = TEAMS * 8 * (groups * M + 2 * warps)
    return (memory - of_teams - SLOTS * (2 * 8 + SLOT)) // (4 * M + CELLS)


@functools.cache
def _compiled(name: str, M: int, near: int, device: torch.device) -> Kernel | None:
    found = torch.cuda.get_device_properties(device)
    memory = getattr(found, "shared_memory_per_block_optin", 0)
    rows = rows_of_ring(M, memory) if memory else 0
    if (found.major, found.minor) < HOPPER or rows < FEWEST_ROWS or not available():
        return None
    constants = {"M": M, "RING": rows, "K": near, "THREADS": THREADS, "TEAMS": TEAMS, name: name}
    try:
        function = _function(name, constants, f"sm_{found.major}{found.minor}", memory)
        return Kernel(function, memory, found.multi_processor_count)
    except (ImportError, RuntimeError) as error:
        logger.info("Triton's passes over the bags are used, which take longer: %s", error)
        return None


@functools.cache
def available() -> bool:
    """Whether NVRTC and the driver can be called."""
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:  # no package `cuda`
        return False


def _function(name: str, constants: dict[str, Any], architecture: str, memory: int) -> Any:
    from cuda.bindings import driver

    (module,) = _checked(driver.cuModuleLoadData(_binary(constants, architecture)))
    (function,) = _checked(driver.cuModuleGetFunction(module, name.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, memory))
    return function


def _binary(constants: dict[str, Any], architecture: str) -> bytes:
    from cuda.bindings import nvrtc

    source = files("gpmil.fast").joinpath("ring_kernel.cu").read_bytes()
    (program,) = _checked(nvrtc.nvrtcCreateProgram(source, b"ring_kernel.cu", 0, [], []))
    options = [f"-D{key.upper()}={value}".encode() for key, value in constants.items()]
    options.append(f"--gpu-architecture={architecture}".encode())
    _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    (size,) = _checked(nvrtc.nvrtcGetCUBINSize(program))
    binary = b" " * size
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def _checked(answer: tuple) -> tuple:
    """What a call returned besides its status; a status that is no success raises."""
    status, *found = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA answered {status!r}")
    return tuple(found)
