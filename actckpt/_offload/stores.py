"""The stores of this process: one for CPU tensors, one for tensors of the accelerator.

`store_for` creates them at first use, with the current settings. The offload hooks (csrc/offload) call them directly
(csrc/offload/store.h).

With `must` (`MUST_CPU_OFFLOAD`, and every `offload` block) `put` may wait for a bounce buffer before the disk; `stats`
counts that. Without it (`PREFER_CPU_OFFLOAD`) `put` never waits: the bytes stay.
"""

import threading
import weakref
from contextlib import suppress
from typing import Any

import torch

from actckpt import _C, config
from actckpt._core import pressure
from actckpt._offload.cpu import CpuStore
from actckpt._offload.device import DeviceStore, no_backend

__all__ = [
    *("cpu_store", "device_store", "inflight_bytes", "is_ready", "limit_windows", "limited", "make_room"),
    *("store_for", "why_none", "window_bytes"),
]


_lock = threading.RLock()
#: By device type, with the generation of their settings.
_stores: dict[str, tuple[int, Any]] = {}
#: Limits of in-flight bytes, by owner.
_limits: dict[weakref.ref[Any], int] = {}


def store_for(device_type: str) -> Any:
    """Return the store for tensors of such devices, created at first use with the current settings.

    Raises:
        OffloadError: no such store is available; says why.
    """
    with _lock:
        generation, known = _stores.get(device_type, (-1, None))
        if generation != config.generation:
            settings = config.settings()
            if device_type == "cpu":
                known = CpuStore.from_settings(settings)
            else:
                known = DeviceStore.from_settings(settings, device_type)
            known.limit_window(min(_limits.values(), default=None))
            _stores[device_type] = config.generation, known
        return known


def is_ready(device_type: str) -> bool:
    """Whether the store exists already, with the current settings."""
    return _stores.get(device_type, (-1, None))[0] == config.generation


def why_none(device_type: str) -> str:
    """Return why there is no store for tensors of such devices, and what to do instead; empty if there is one."""
    return "" if device_type in ("cpu", "meta") or is_ready(device_type) else no_backend(device_type)


def cpu_store() -> CpuStore | None:
    """Return the store of CPU tensors if it exists and is ours."""
    store = _stores.get("cpu", (0, None))[1]
    return store if isinstance(store, CpuStore) else None


def device_store() -> DeviceStore | None:
    """Return the store of device tensors if it exists and is ours."""
    return next((store for _, store in list(_stores.values()) if isinstance(store, DeviceStore)), None)


def _release_free_slabs(nbytes: int) -> int:
    """Return all free host memory to the system, whatever was requested; returns the number of bytes."""
    made = device_store()
    with suppress(_C.ForkedError):
        return 0 if made is None else made.engine.trim()
    return 0


pressure.register("host pool", _release_free_slabs)


def limit_windows(owner: Any, nbytes: int | None) -> None:
    """Limit in-flight bytes to `nbytes` from now on, while `owner` is alive; None removes the limit.

    The lowest limit of all owners applies to all stores.
    """
    with _lock:
        owned = weakref.ref(owner, _forget)
        if nbytes is None:
            _limits.pop(owned, None)
        else:
            _limits[owned] = nbytes
        _limit_all()


def _forget(owned: weakref.ref[Any]) -> None:
    with _lock:
        if _limits.pop(owned, None) is not None:
            _limit_all()


def _limit_all() -> None:
    for _, made in list(_stores.values()):
        with suppress(_C.ForkedError):
            made.limit_window(min(_limits.values(), default=None))


def make_room(device: torch.device) -> None:
    """Make a device's current stream, or the program on a CPU, wait for copies out beyond the window."""
    made = _stores.get(device.type, (0, None))[1]
    if made is not None:
        made.make_room(device)


def inflight_bytes(device: torch.device) -> int:
    """Return the bytes that the store holds on a device until copies have ended."""
    made = _stores.get(device.type, (0, None))[1]
    if made is None:
        return 0
    made.poll()
    return int(made.engine.stats().inflight_bytes)


def limited(nbytes: int) -> int:
    """Return `nbytes`, or less if owners limit it."""
    return min([nbytes, *_limits.values()])


def window_bytes() -> int:
    """Return the current in-flight limit of the existing stores, in bytes."""
    return max((made.window_bytes for _, made in list(_stores.values())), default=0)
