"""The order in which backward reads offloaded tensors, and which of them are prefetched.

NOTE [ Prefetching ]

The expected order is that of the last backward of a session that offloaded the same sizes, else the reverse order of
offloading. When nothing is left in a session, the session before it follows. An order is recorded when the last span is
read: the spans may be gone before the backward ends.

Prefetched bytes that were not unpacked yet stay within a window, one for the process. What a backward prefetched
without using it is released when the backward ends or fails (csrc/core/task_end.h), or under memory pressure
(NOTE [ Pressure ]). Then it is read when it is needed. Tensors that backward does not need (originals of audits) are
never prefetched.

Under the windows of a plan (NOTE [ Windows of a plan ]), the tensors that the current block itself offloaded have their
own room, and nothing else is prefetched into it. That also holds after they were unpacked: they exist while operators
read them, and then workspaces and results may take their place.

The code is in csrc/offload: reading.h, orders.h.
"""

from actckpt import _C, config
from actckpt._core import pressure
from actckpt._offload import stores

__all__ = ["max_inflight"]


def max_inflight() -> int:
    """Return the window of NOTE [ Prefetching ] in bytes."""
    window = config.settings().window_bytes
    return stores.window_bytes() if window is None else stores.limited(window)


pressure.register("read-ahead", _C.release_read_ahead)
pressure.register("reloads", _C.release_reloads)
