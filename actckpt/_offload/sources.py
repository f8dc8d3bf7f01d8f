"""Prevents memory from being freed under a copy that reads it.

NOTE [ Sources ]

A reference to a storage keeps the storage alive, not its memory. `untyped_storage().resize_(0)` frees the memory at
once (Megatron's CheckpointWithoutOutput and FSDP do so). A running copy out of a device would then read memory that
holds something else by now. Neither size nor address shows that afterwards, since the same address may be allocated
again. CPU tensors are copied before `put` returns: nothing reads their memory later.

So storages that the engine may read are watched (csrc/offload/sources.h), from before their copy is queued until the
engine releases them. From the first copy on, the methods of UntypedStorage that free memory wait for the copies out of
a watched storage, and the engine releases it. Backward gets what was copied, not what the memory holds by then. Tensors
saved later in that storage are copied anew (NOTE [ Spans ]). Programs that free nothing pay nothing.

C++ code that enlarges a storage (`h.resize_(larger)`, an `out=` that must grow) does not wait. Bytes copied while their
memory was replaced are never used: unpack takes them from the storage, which moved them along when it grew. If the
saved tensor itself grew, unpack raises before that, since it was changed in place. An alias with its own version
counter, such as `h.data`, does not change it.
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
#: Stores that were used for copies. A store that died has ended its copies.
_used: "weakref.WeakSet[Any]" = weakref.WeakSet()
_is_installed = False


def guard(store: Any) -> None:
    """Ensure that no memory is freed while `store` copies it out. Called before its first copy."""
    global _is_installed
    with _lock:
        _used.add(store)
        if not _is_installed:
            for name in torch_private.FREEING_METHODS:
                setattr(torch.UntypedStorage, name, _waiting(getattr(torch.UntypedStorage, name)))
            _is_installed = True


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of UntypedStorage, wrapped to wait for copies out of the storage first."""

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
        if isinstance(store, DeviceStore):
            store.poll()  # otherwise it would keep returning a source whose memory is replaced
