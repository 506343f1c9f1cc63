"""`gpmil doctor`: whether this installation can work, and what to do where it cannot."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from gpmil import extras
from gpmil.cli.terminal import print_line

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
GIB = 2**30
LEAST_DISK = 2 * GIB

# Module, what it is for, the extra that has it
OPTIONAL = (
    ("openslide", "thumbnails of slides", "slides"),
    ("pyarrow", "parquet tables", "parquet"),
    ("fastapi", "the viewer", "viewer"),
    ("uvicorn", "the viewer", "viewer"),
    ("numba", "compiled loops, up to twice as fast", "fast"),
    ("distributed", "a fit on several machines with Dask", "dask"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    grade: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.grade} {self.text}" + (f". Fix: {self.fix}" if self.fix else "")


def run() -> bool:
    """Print what was found; whether nothing failed."""
    found = list(findings())
    for finding in found:
        print_line(str(finding))
    counts = {grade: sum(f.grade == grade for f in found) for grade in (PASS, WARN, FAIL)}
    print_line(", ".join(f"{n} {grade}" for grade, n in counts.items()))
    return not counts[FAIL]


def findings(place: Path | None = None) -> Iterator[Finding]:
    """Everything that is looked at."""
    yield from _python()
    yield from _packages()
    yield from _torch()
    yield from _threads()
    yield _disk(place or Path.cwd())
    yield from _optional()


def _python() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    wanted = metadata.metadata("gpmil")["Requires-Python"]
    found = platform.python_version()
    fits = SpecifierSet(wanted).contains(found, prereleases=True)
    yield Finding(
        PASS if fits else FAIL,
        f"Python {found} (needs {wanted})",
        "" if fits else f"make an environment with Python {wanted}",
    )


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    for text in sorted(metadata.requires("gpmil") or []):
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        yield package(need.name, need.specifier)


def package(name: str, wanted) -> Finding:
    """Whether a required package is there, in a version that was tried."""
    fix = f"pip install '{name}{wanted}'"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(FAIL, f"{name} is not installed (needs {wanted})", fix)
    if not wanted.contains(found, prereleases=True):
        return Finding(FAIL, f"{name} {found} (needs {wanted})", fix)
    return Finding(PASS, f"{name} {found} (needs {wanted})")


def _torch() -> Iterator[Finding]:
    try:
        torch = import_module("torch")
        right = bool((torch.ones(2, 2).double() @ torch.ones(2, 2).double()).eq(2).all())
    except Exception as error:  # whatever a broken build raises
        yield Finding(FAIL, f"torch does not work: {error}", "install torch again")
        return
    if not right:
        yield Finding(FAIL, "torch multiplies matrices wrongly", "install torch again")
    if torch.cuda.is_available():
        yield Finding(PASS, f"GPU: {torch.cuda.get_device_name()}")
    else:
        yield Finding(PASS, "GPU: none, gpmil runs on the CPU")


def _threads() -> Iterator[Finding]:
    from threadpoolctl import threadpool_info

    cores = os.cpu_count() or 1
    for pool in threadpool_info():
        name = f"{pool['user_api']} ({pool['internal_api']}): {pool['num_threads']} threads"
        many = pool["num_threads"] > cores
        fix = f"set OMP_NUM_THREADS={cores}" if many else ""
        yield Finding(WARN if many else PASS, f"{name}, {cores} cores", fix)


def _disk(place: Path) -> Finding:
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free on the disk of the current folder"
    if free < LEAST_DISK:
        return Finding(WARN, text, "free some space, or write to another disk with --out")
    return Finding(PASS, text)


def _optional() -> Iterator[Finding]:
    for module, purpose, extra in OPTIONAL:
        if find_spec(module) is None:
            fix = extras.install(extra)
            yield Finding(WARN, f"{module} is not installed (for {purpose})", fix)
        else:
            yield Finding(PASS, f"{module} is installed ({purpose})")
