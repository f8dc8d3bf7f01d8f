"""Storages whose memory the program frees or replaces.

NOTE [ Sources ]

A reference to a storage keeps the storage alive, not its memory. `untyped_storage().resize_(0)` frees the memory at
once, and a running copy out of a device would then read memory that holds something else by now. So the storages of
running copies are watched (csrc/offload/sources.h), until the engine releases them. CPU tensors are copied before `put`
returns: nothing reads their memory later.

From the first store on, the methods of UntypedStorage that free memory raise while it is being copied. Where it is not,
the next save copies the storage again: neither size, address nor version shows that the program has filled it again
(NOTE [ Spans ]). Programs that free nothing pay nothing.

C++ code that enlarges a storage (`h.resize_(larger)`, an `out=` that must grow) calls no such method. What was copied
while the memory was replaced is never used: unpack raises. On a CPU that holds for the thread that copies; another
thread that enlarges a tensor meanwhile frees what is being read, as it would for any operator of torch.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from actckpt import _C
from actckpt._core import torch_private

__all__ = ["protect"]

_lock = threading.Lock()
#: What may be copying. A store that died has ended its copies.
_stores: "weakref.WeakSet[Any]" = weakref.WeakSet()
_is_installed = False


def protect(store: Any) -> None:
    """Ensure that no memory is freed while `store` copies it out. Called before its first copy."""
    global _is_installed
    with _lock:
        _stores.add(store)
        if not _is_installed:
            for name in torch_private.FREEING_METHODS:
                setattr(torch.UntypedStorage, name, _checked(getattr(torch.UntypedStorage, name)))
            _is_installed = True


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of UntypedStorage, which raises while the storage is being copied."""

    @functools.wraps(method)
    def check_and_call(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if _C.is_source(storage):
            _release_copied()
            if _C.is_source(storage):
                raise _C.OffloadError(
                    f"The memory of a storage of {storage.nbytes()} bytes is being copied to a store: it cannot be "
                    "freed or replaced yet.\nSynchronize its device first, or keep the tensor out of the offload block."
                )
        _C.end_sharing(storage)
        return method(storage, *args, **kwargs)

    return check_and_call


def _release_copied() -> None:
    with _lock:
        stores = tuple(_stores)
    for store in stores:
        store.poll()
