"""Keeps memory of devices from being freed under a copy that reads it, and tells memory that was filled anew.

NOTE [ Sources ]

A reference to a storage keeps the storage, not its memory: `untyped_storage().resize_(0)` frees that at once
(Megatron's CheckpointWithoutOutput and FSDP do so), and moving a storage to shared memory replaces it. A copy out of a
device that is under way would read memory that holds something else by now; neither the size nor the address tells
afterwards, since the same address may be given out again. CPU tensors are copied before `put` returns.

Rule 1. What a copy from a device may read is watched (csrc/offload/sources.h) from before it is queued until the
        engine releases it.
Rule 2. From the first copy on, the methods of UntypedStorage that free memory wait for the copies out of a
        storage that is watched, and let the engine release it: backward gets what was copied, not what the memory
        holds by then. What is saved in the storage later is moved anew (NOTE [ Spans ]). There is no cost where nothing
        is freed.
Rule 3. C++ that enlarges a storage (`h.resize_(larger)`, an `out=` that must grow) does not wait. What was copied while
        its memory was replaced is never used: unpack takes the bytes from the storage, which took them along when it
        grew. (If the saved tensor itself grew, unpack raises before that: it was changed in place. An alias with a
        version counter of its own, as `h.data`, does not change it.)
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from actckpt import _C
from actckpt._core import devices, torch_private
from actckpt._offload.device import DeviceStore

__all__ = ["guard"]

_lock = threading.Lock()
#: Stores of devices that copies were given to. One that died has ended its copies.
_used: "weakref.WeakSet[DeviceStore]" = weakref.WeakSet()
_is_installed = False


def guard(store: Any) -> None:
    """See to it that no memory is freed while `store` copies it out. Called before its first copy."""
    global _is_installed
    with _lock:
        if isinstance(store, DeviceStore):
            _used.add(store)
        if not _is_installed:
            for name in torch_private.FREEING_METHODS:
                setattr(torch.UntypedStorage, name, _waiting(getattr(torch.UntypedStorage, name)))
            _is_installed = True


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of UntypedStorage, waiting for the copies out of the storage first."""

    @functools.wraps(method)
    def wait_and_call(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if _C.is_source(storage):
            _finish_copies(storage.device)
            _C.end_sources(storage)
        _C.end_sharing(storage)
        return method(storage, *args, **kwargs)

    return wait_and_call


def _finish_copies(device: torch.device) -> None:
    with _lock:
        used = tuple(_used)
    devices.synchronize(device)
    for store in used:
        store.poll()  # else it would go on handing out a source whose memory is replaced
