"""The stores of this process: where offloaded bytes live, one for tensors of the CPU, one for those of the accelerator.

`cpu_store` and `device_store` make them at first use, with the settings in force. The hooks of offloading
(csrc/offload) call the store of the CPU directly, and any other Python object through the methods of `Store`.

With `must` (`MUST_CPU_OFFLOAD`, and every `offload` block) `put` may wait where copies are behind: CPU tensors for the
window, device tensors only for a bounce buffer below pinned memory; counted in `stats`. Without (`PREFER_CPU_OFFLOAD`)
it never waits: the bytes stay.
"""

import threading
import weakref
from contextlib import suppress
from typing import Any, Protocol

import torch

from actckpt import _C, config
from actckpt._core import pressure
from actckpt._offload.cpu import CpuStore
from actckpt._offload.device import DeviceStore, no_backend

__all__ = [
    *("Store", "cpu_store", "device_store", "inflight_bytes", "is_ready", "limit_windows", "limited", "make_room"),
    *("store_for", "why_none", "window_bytes"),
]


class Store(Protocol):
    """A store that is a Python object. Its tickets have a method `unload`.

    Rules for stores: what `put` was given as `source` is held until its bytes are safe elsewhere, and must not refer to
    the ticket. Dropping the last reference to a ticket ends it: that never waits and may happen in the garbage
    collector; a copy that is under way keeps its memory until it has ended. Every method may be called from any thread,
    and while a compiled function runs: what hooks call is `torch_private.untraced`.
    """

    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        """Begin to move bytes out; returns a ticket, or None if they stay. Waits for room only if `must`."""

    def saved_again(self, ticket: Any, device: torch.device, storage: torch.UntypedStorage) -> None:
        """Note that the same bytes were saved again, perhaps on another stream, from that storage."""

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes:
        """Return the bytes, valid for the current stream."""

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes | None:
        """Begin to bring the bytes back; returns to where, None if there is no need. Never waits."""

    def make_room(self, device: torch.device) -> None:
        """Let the current stream of a device, or on a CPU the program, wait for copies out beyond the window."""

    def limit_window(self, nbytes: int | None) -> None:
        """Have no more bytes on their way from now on; None: as many as the settings say."""


_lock = threading.RLock()
#: By the type of the devices whose tensors it takes, with the generation of its settings.
_stores: dict[str, tuple[int, Any]] = {}
#: Most bytes that may be on their way, by who says so.
_limits: dict[weakref.ref[Any], int] = {}


def store_for(device_type: str) -> Any:
    """Return the store for tensors of such devices, made at first use with the settings in force.

    Raises:
        EngineError: it cannot be had here; says why.
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
    """Whether the store was made already with the settings in force."""
    return _stores.get(device_type, (-1, None))[0] == config.generation


def why_none(device_type: str) -> str:
    """Return why there can be no store for tensors of such devices, and what to do instead; empty if there can be."""
    return "" if device_type in ("cpu", "meta") or is_ready(device_type) else no_backend(device_type)


def cpu_store() -> CpuStore | None:
    """Return the store of CPU tensors if there is one already, and it is ours."""
    found = _stores.get("cpu", (0, None))[1]
    return found if isinstance(found, CpuStore) else None


def device_store() -> DeviceStore | None:
    """Return the store of device tensors if there is one already, and it is ours."""
    return next((store for _, store in list(_stores.values()) if isinstance(store, DeviceStore)), None)


def _release_free_slabs(nbytes: int) -> int:
    """Give free host memory back to the system, however much is asked for; returns how many bytes it was."""
    released = 0
    for made in (cpu_store(), device_store()):
        with suppress(_C.ForkedError):
            released += 0 if made is None else made.engine.trim()
    return released


pressure.register("host pool", _release_free_slabs)


def limit_windows(owner: Any, nbytes: int | None) -> None:
    """Have no more than so many bytes on their way, from now on and as long as `owner` lives; None: no such limit.

    The least of what several owners say counts, for all stores.
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
    """Let the current stream of a device, or on a CPU the program, wait for copies out beyond the window."""
    made = _stores.get(device.type, (0, None))[1]
    if made is not None:
        made.make_room(device)


def inflight_bytes(device: torch.device) -> int:
    """Return what the store holds on a device until copies have passed."""
    made = _stores.get(device.type, (0, None))[1]
    if made is None:
        return 0
    made.poll()
    return int(made.engine.stats().inflight_bytes)


def limited(nbytes: int) -> int:
    """Return a number of bytes, or less where that is what owners allow."""
    return min([nbytes, *_limits.values()])


def window_bytes() -> int:
    """Return how many bytes the stores that exist would have on their way at once."""
    return max((made.window_bytes for _, made in list(_stores.values())), default=0)
