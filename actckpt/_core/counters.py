"""Counters of the runtime's work in this process."""

import threading
from collections import Counter

__all__ = ["counters"]


class Counters:
    """Named sums; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, name: str, amount: int) -> None:
        """Add `amount` to the sum `name`."""
        with self._lock:
            self._sums[name] += amount

    def value(self, name: str) -> int:
        """Return the sum `name`."""
        return self._sums[name]


counters = Counters()
