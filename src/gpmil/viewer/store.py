"""A cache that forgets what was used longest ago, bounded in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Store(Generic[T]):
    """Values by key, made when first asked for; several threads may ask at once.

    Of threads that ask for the same value, one makes it and the others wait. The last value is
    kept even where it alone is larger than `most`.
    """

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        self.most, self.size, self.total = most, size, 0
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            turn = self._making.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._kept:
                    return self._kept[key]
            try:
                value = make()
                with self._lock:
                    self._keep(key, value)
            finally:
                with self._lock:
                    self._making.pop(key, None)
            return value

    def _keep(self, key: Hashable, value: T) -> None:
        if key in self._kept:  # made twice, where two threads came at the wrong moment
            self.total -= self.size(self._kept[key])
        self._kept[key] = value
        self.total += self.size(value)
        while self.total > self.most and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self.total -= self.size(old)
