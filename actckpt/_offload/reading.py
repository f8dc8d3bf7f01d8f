"""In which order backward reads what was moved, and what is read ahead of it.

NOTE [ Reading ahead ]

Rule 1. The order is that of the last backward of a session that moved the same sizes, else the reverse order
        of moving. Where a session has nothing left, the session before it follows.
Rule 2. What is read ahead and not yet asked for stays within a window of bytes, one for the process.
Rule 3. What a backward read ahead in vain is released when it ends, also when it fails (csrc/core/task_end.h), or when
        room must be made (NOTE [ Pressure ]). Then it is read when it is asked for.
Rule 4. An order is learnt when the last span is read: the spans may be gone before the backward has ended.

The orders that were learnt are kept here; all else is in csrc/offload/reading.cpp.
"""

import threading
from collections import OrderedDict

from actckpt import _C, config
from actckpt._core import pressure
from actckpt._offload import backends

__all__ = ["learnt_order", "max_inflight", "note_order"]

_MAX_LEARNT_ORDERS = 64

_lock = threading.Lock()
#: Orders of earlier backwards, by the sizes that the session moved.
_learnt: "OrderedDict[tuple[int, ...], tuple[int, ...]]" = OrderedDict()


def learnt_order(sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the places of a session's spans in the order in which backward will read them, if it is known."""
    with _lock:
        return _learnt.get(sizes)


def note_order(sizes: tuple[int, ...], places: tuple[int, ...]) -> None:
    """Remember the order of a backward that read all of a session's spans."""
    with _lock:
        _learnt[sizes] = places
        _learnt.move_to_end(sizes)
        while len(_learnt) > _MAX_LEARNT_ORDERS:
            _learnt.popitem(last=False)


def max_inflight() -> int:
    """Return the window of Rule 2 in bytes."""
    window = config.settings().window_bytes
    return backends.window_bytes() if window is None else window


pressure.register("read-ahead", _C.release_read_ahead)
pressure.register("reloads", _C.release_reloads)
