"""Counters of all stores of this process, including those replaced by new settings."""

import itertools
import threading
import weakref
from collections import Counter
from contextlib import suppress

from actckpt import _C

__all__ = ["note", "sums"]

_lock = threading.RLock()  # the garbage collector may end a store at any time, also while this thread sums up
_keys = itertools.count()
#: Engines, or the final counters of engines that are gone.
_counts: "dict[int, _C.DeviceEngine | dict[str, float]]" = {}


def note(store: object, engine: _C.DeviceEngine) -> None:
    """Include the counters of `engine` from now on; `store` is its only user."""
    with _lock:
        key = next(_keys)
        _counts[key] = engine
    weakref.finalize(store, _retire, key).atexit = False


def _retire(key: int) -> None:
    with _lock, suppress(_C.ForkedError):
        engine = _counts[key]
        assert not isinstance(engine, dict)
        _counts[key] = {}
        _counts[key] = _sums_of(engine.stats())


def sums() -> "Counter[str]":
    """Return sums by the field names of `actckpt.Stats`."""
    with _lock:
        total: Counter[str] = Counter()
        for counts in list(_counts.values()):
            total.update(counts if isinstance(counts, dict) else _sums_of(counts.stats()))
        return total


def _sums_of(stats: _C.DeviceStats) -> dict[str, float]:
    return {
        "prefetched_reloads": stats.num_prefetched,
        "late_reloads": stats.num_late,
        "stall_seconds": stats.stall_seconds,
        "failed_writes": stats.num_failed_writes,
        "kept_full": stats.num_kept_full,
        "kept_failed": stats.num_kept_failed,
        "kept_busy": stats.num_kept_busy + stats.num_kept_behind,
        "kept_capturing": stats.num_kept_capturing,
    }
