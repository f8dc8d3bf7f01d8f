"""What the stores of this process have counted, also those that new settings replaced."""

import itertools
import threading
import weakref
from collections import Counter
from contextlib import suppress

from actckpt._offload import native

__all__ = ["note", "sums"]

Engine = native.CpuStore | native.DeviceEngine

_lock = threading.RLock()  # the garbage collector may end a backend at any time, also while this thread sums up
_keys = itertools.count()
#: Engines, and what those counted that are gone.
_counts: "dict[int, Engine | dict[str, float]]" = {}


def note(backend: object, engine: Engine) -> None:
    """Count what `engine` does from now on; `backend` is its only user."""
    with _lock:
        key = next(_keys)
        _counts[key] = engine
    weakref.finalize(backend, _retire, key).atexit = False


def _retire(key: int) -> None:
    with _lock, suppress(native.ForkedError):
        engine = _counts[key]
        assert not isinstance(engine, dict)
        _counts[key] = {}
        _counts[key] = _sums_of(engine.stats())


def sums() -> "Counter[str]":
    """Return sums by the names of `actckpt.Stats`."""
    with _lock:
        total: Counter[str] = Counter()
        for found in list(_counts.values()):
            total.update(found if isinstance(found, dict) else _sums_of(found.stats()))
        return total


def _sums_of(figures: native.HostStats | native.DeviceStats) -> dict[str, float]:
    found = {
        "prefetched_reloads": figures.num_prefetched,
        "late_reloads": figures.num_late,
        "stall_seconds": figures.stall_seconds,
        "failed_writes": figures.num_failed_writes,
    }
    if isinstance(figures, native.HostStats):  # what is not written stays: the put itself always succeeds
        kept = {
            "kept_full": figures.num_full_writes,
            "kept_failed": figures.num_failed_writes - figures.num_full_writes,
            "kept_busy": figures.num_kept_busy,
        }
    else:
        kept = {
            "kept_full": figures.num_kept_full,
            "kept_failed": figures.num_kept_failed,
            "kept_busy": figures.num_kept_busy + figures.num_kept_behind,
            "kept_capturing": figures.num_kept_capturing,
        }
    return found | kept
