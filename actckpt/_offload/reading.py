"""In which order backward reads what was moved, and what is read ahead of it.

NOTE [ Reading ahead ]

Rule 1. The order is that of the last backward of a session that moved the same sizes, else the reverse order
        of moving. Where a session has nothing left, the session before it follows.
Rule 2. What is read ahead and not yet asked for stays within a window of bytes, one for the process.
Rule 3. What a backward read ahead in vain is released when it ends, also when it fails (csrc/core/task_end.h), or when
        room must be made (NOTE [ Pressure ]). Then it is read when it is asked for.
Rule 4. An order is learnt when the last span is read: the spans may be gone before the backward has ended.
Rule 5. Within the windows of a plan (NOTE [ Windows of a plan ]), what the block moved itself that backward has come to
        has room of its own. Nothing else is read into that, also once it was asked for: it is there while operators
        read it, and their workspaces and results may take its place.
Rule 6. What backward does not need (originals of audits) is never read ahead, nor does it come in between.

All but the setting is in csrc/offload: reading.h, orders.h.
"""

from actckpt import _C, config
from actckpt._core import pressure
from actckpt._offload import stores

__all__ = ["max_inflight"]


def max_inflight() -> int:
    """Return the window of Rule 2 in bytes."""
    window = config.settings().window_bytes
    return stores.window_bytes() if window is None else stores.limited(window)


pressure.register("read-ahead", _C.release_read_ahead)
pressure.register("reloads", _C.release_reloads)
