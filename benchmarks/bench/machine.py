"""What the numbers were measured on; no host name, no path."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from gpmil import __version__


def facts() -> dict[str, Any]:
    """Processor, cores, memory, GPU and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_gb": round(memory() / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpmil": __version__,
    }


def cores() -> int:
    """Those that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def memory() -> int:
    """Bytes of memory; 0 where the system does not tell."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()
