"""Memory pressure: one call asks every holder of restorable bytes to release some.

NOTE [ Pressure ]

Released bytes are restored when backward needs them: they are copied, replayed or rerun again, bit-identically. So
`release` may be called at any time from any thread: between operators, in a hook of a backward, while other threads run
backwards.

Holders are asked in the order of `ORDER`, by the cost of restoring their bytes: a copy that was started too early
anyway; a copy; the operators behind one value; a region's function. Host memory is last: it gives no tensor memory
back, and new slabs must be registered with the driver.

A holder counts bytes that are free when it returns, or once its running copies end. It does not count bytes that others
hold too.

A holder must not block: it takes no lock that is held while operators or user code run. It first makes its own state
consistent, then frees tensors, since freeing may run user code.
"""

from collections.abc import Callable

__all__ = ["ORDER", "register", "release"]

#: All holders, in the order in which they are asked.
ORDER = (
    "read-ahead",  # loaded bytes that backward has not unpacked yet (csrc/offload/reading.h)
    "reloads",  # bytes loaded for one saved tensor and kept for others on them
    "replay caches",  # replayed values that the same backward needs again (csrc/graph/needs.h)
    "rerun values",  # rerun values that backward has not unpacked yet (csrc/rerun/frame.h)
    "host pool",  # free slabs of pinned memory
)

_holders: dict[str, Callable[[int], int]] = {}


def register(name: str, release: Callable[[int], int]) -> None:
    """Add a holder.

    Args:
        name: one of `ORDER`.
        release: releases at least the requested number of bytes, or all it has; returns how many it released. See
            NOTE [ Pressure ].

    Raises:
        ValueError: `ORDER` does not have the name, or another holder uses it.
    """
    if name not in ORDER or name in _holders:
        raise ValueError(f"No holder can be registered as {name!r}. Give it a name of its own in pressure.ORDER.")
    _holders[name] = release


def release(nbytes: int) -> dict[str, int]:
    """Ask the holders in turn until `nbytes` are released or none are left.

    Returns:
        The bytes released by each holder that was asked, by name, in order.
    """
    released: dict[str, int] = {}
    missing = nbytes
    for name in ORDER:
        if missing <= 0:
            break
        if name in _holders:
            released[name] = _holders[name](missing)
            missing -= released[name]
    return released
