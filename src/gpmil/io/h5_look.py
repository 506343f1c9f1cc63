"""A first look at HDF5 files, in a process of its own.

On a damaged file libhdf5 may run for ever or end the process: a few zeroed bytes are enough. So a
helper process touches all that a reader will touch, under limits of time and memory; what it
does not survive is no file to be read. The helper runs this file as a script, which therefore
imports nothing of gpmil, and it lives as long as the process that asks.
"""

import atexit
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

SECONDS = 5.0
"""Computing time for the look at one file; a header takes milliseconds."""
WAITING = 120.0
"""Time until the answer, on a slow disk."""
MEMORY = 1 << 32
LOOKED_AT = ("features", "feats", "patch_embeddings", "coords")
SMALL = 1 << 20
MOST_COMPRESSED = 1032  # deflate: a byte holds no more


def fault(path: Path) -> str | None:
    """What is wrong with an HDF5 file; None where nothing is."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return None  # no interpreter to be started
    return _helper(os.getpid()).ask(path)


def require_whole(dataset: Any) -> None:
    """Refuse a dataset that claims more than the file holds, which HDF5 would fill with zeros."""
    if dataset.shape is None:
        raise ValueError(f"{dataset.name} holds no array")
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"the values of {dataset.name} are in other files")
    claimed = math.prod(dataset.shape) * dataset.dtype.itemsize
    stored = dataset.id.get_storage_size()
    packed = dataset.chunks is not None
    if claimed > stored * (MOST_COMPRESSED if packed else 1):
        raise ValueError(
            f"{dataset.name} claims shape {dataset.shape}, {claimed:,} bytes, and only {stored:,} "
            "are there"
        )
    if packed and claimed:
        pieces = math.prod(-(-n // k) for n, k in zip(dataset.shape, dataset.chunks))
        there = dataset.id.get_num_chunks()
        if there < pieces:
            raise ValueError(f"{there} of {pieces} pieces of {dataset.name} are there")


# ------------------------------------------------------------------ the process that asks


@cache
def _helper(process: int) -> "_Helper":
    """The helper of a process; a fork of it starts its own."""
    return _Helper()


class _Helper:
    """The other process, started again after a file that ended it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._start()
        atexit.register(self._end)

    def _start(self) -> None:
        self.process = subprocess.Popen(
            # -P: the modules beside this file are not to be found as if they were installed
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.works = self._hear() == "ready"

    def ask(self, path: Path) -> str | None:
        """What the helper finds wrong; nothing where it cannot work here."""
        with self.lock:
            if not self.works:
                return None
            answer = self._answer(path)
            if answer is None:
                self._end()
                self._start()
                return "libhdf5 cannot cope with it and would run for ever, or crash"
            return answer or None

    def _answer(self, path: Path) -> str | None:
        timer = threading.Timer(WAITING, self.process.kill)
        timer.start()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([str(path.absolute()), SECONDS]) + "\n")
            self.process.stdin.flush()
            return self._hear()
        except BrokenPipeError:
            return None
        finally:
            timer.cancel()

    def _hear(self) -> str | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()


# ------------------------------------------------------------------ the helper


def _look(path: str) -> None:
    """Touch what a reader may touch; whatever is wrong is raised."""
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        dict(file.attrs)
        names = list(file)
        for name in names if len(names) == 1 else set(names).intersection(LOOKED_AT):
            found = file[name]
            dict(found.attrs)
            if isinstance(found, h5py.Dataset):
                require_whole(found)
                _touch(found)


def _touch(dataset: Any) -> None:
    if math.prod(dataset.shape) * dataset.dtype.itemsize <= SMALL:
        dataset[()]
    else:
        dataset[:1], dataset[-1:]


def _fault(path: str) -> str:
    try:
        _look(path)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return said or type(error).__name__
    return ""


def _limit(seconds: float) -> None:
    """End this process when it computes for longer, also if nobody is left to end it."""
    try:
        import resource
    except ImportError:  # Windows: the one that asks waits no longer than WAITING
        return
    used = time.process_time()
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds), most))


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asks ends, and so does this
    import h5py  # noqa: F401  before the limits, and before it says that it is ready

    _limit_memory()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        path, seconds = json.loads(line)
        _limit(seconds)
        print(json.dumps(_fault(path)), file=answers, flush=True)


if __name__ == "__main__":
    _main()
