"""Progress lines of a fit on the terminal, for those who ask for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import INFO, StreamHandler, getLogger
from threading import Lock

logger = getLogger("gpmil")


@contextmanager
def progress_shown(verbose: bool) -> Iterator[None]:
    """With verbose, the library's progress lines go to the terminal while fitting.

    Once each: the first of fits inside each other, or side by side, shows them for all.
    """
    if not verbose:
        yield
        return
    _PROGRESS.enter()
    try:
        yield
    finally:
        _PROGRESS.leave()


class _ProgressHandler:
    """The handler that shows progress, there while any fit wants it."""

    def __init__(self) -> None:
        self.lock, self.fits = Lock(), 0

    def enter(self) -> None:
        with self.lock:
            if not self.fits:
                self.handler, self.level = StreamHandler(), logger.level
                logger.addHandler(self.handler)
                logger.setLevel(min(self.level or INFO, INFO))
            self.fits += 1

    def leave(self) -> None:
        with self.lock:
            self.fits -= 1
            if not self.fits:
                logger.removeHandler(self.handler)
                logger.setLevel(self.level)


_PROGRESS = _ProgressHandler()
