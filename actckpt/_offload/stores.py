"""The stores of this process: where offloaded bytes live, one for tensors of the CPU, one for those of devices.

`cpu_store` and `device_store` make them at first use, with the settings in force. The hooks of offloading
(csrc/offload) call the store of the CPU directly, and any other Python object through the methods of `Store`.

With `must` (`MUST_CPU_OFFLOAD`, and every `offload` block) `put` may wait where copies are behind: CPU tensors for the
window, device tensors only for a bounce buffer below pinned memory; counted in `stats`. Without (`PREFER_CPU_OFFLOAD`)
it never waits: the bytes stay. `ticket.timing` (`actckpt._offload.demotion.Timing`) tells afterwards how long the
program waited for that ticket.
"""

import threading
from contextlib import suppress
from typing import Any, Protocol

import torch

from actckpt import _C, config
from actckpt._core import pressure
from actckpt._offload.cpu import CpuStore
from actckpt._offload.device import DeviceStore

__all__ = ["Store", "cpu_store", "device_store", "is_ready", "store_for", "window_bytes"]


class Store(Protocol):
    """A store that is a Python object. Its tickets have a method `unload` and a `timing`.

    Rules for stores: what `put` was given as `source` is held until its bytes are safe elsewhere, and must not refer to
    the ticket. Dropping the last reference to a ticket ends it: that never waits and may happen in the garbage
    collector; a copy that is under way keeps its memory until it has ended. Every method may be called from any thread.
    """

    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        """Begin to move bytes out; returns a ticket, or None if they stay. Waits for room only if `must`."""

    def saved_again(self, ticket: Any, device: torch.device) -> None:
        """Note that the same bytes were saved again, perhaps on another stream."""

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes:
        """Return the bytes, valid for the current stream."""

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes | None:
        """Begin to bring the bytes back; returns to where, None if there is no need. Never waits."""


_lock = threading.RLock()
#: The store of the CPU and that of devices, by whether it is of a device, with the generation of their settings.
_stores: dict[bool, tuple[int, Any]] = {}


def store_for(on_device: bool) -> Any:
    """Return the store for tensors of devices, or of the CPU, made at first use with the settings in force.

    Raises:
        EngineError: it cannot be had here; says why.
    """
    with _lock:
        generation, known = _stores.get(on_device, (-1, None))
        if generation != config.generation:
            settings = config.settings()
            known = DeviceStore.from_settings(settings) if on_device else CpuStore.from_settings(settings)
            _stores[on_device] = config.generation, known
        return known


def is_ready(on_device: bool) -> bool:
    """Whether the store was made already with the settings in force."""
    return _stores.get(on_device, (-1, None))[0] == config.generation


def cpu_store() -> CpuStore | None:
    """Return the store of CPU tensors if there is one already, and it is ours."""
    found = _stores.get(False, (0, None))[1]
    return found if isinstance(found, CpuStore) else None


def device_store() -> DeviceStore | None:
    """Return the store of device tensors if there is one already, and it is ours."""
    found = _stores.get(True, (0, None))[1]
    return found if isinstance(found, DeviceStore) else None


def _release_free_slabs(nbytes: int) -> int:
    """Give free host memory back to the system, however much is asked for; returns how many bytes it was."""
    made = device_store()
    with suppress(_C.ForkedError):
        return 0 if made is None else made.engine.trim()
    return 0


pressure.register("host pool", _release_free_slabs)


def window_bytes() -> int:
    """Return how many bytes the stores that exist would have on their way at once."""
    return max((made.window_bytes for _, made in list(_stores.values())), default=0)
