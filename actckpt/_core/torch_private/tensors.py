"""Private names of tensors and storages: facts about them, and the methods that free their memory."""

from collections.abc import Callable
from typing import Any

import torch

from actckpt._core.torch_private.lookup import lookup, optional

#: A capsule with C functions that describe a tensor in numbers (DLPack's C exchange API). Missing before torch 2.10:
#: attributes are read one by one, which is slower.
exchange_api: Any = optional("torch.Tensor.__dlpack_c_exchange_api__")

#: A view with the neg bit set; computes nothing.
neg_view: Callable[[torch.Tensor], torch.Tensor] = lookup("torch._neg_view")

#: Methods of UntypedStorage that free memory that tensors still refer to. `resize_` is public; `share_memory_` and
#: multiprocessing use the others.
FREEING_METHODS = ("resize_", "_share_fd_cpu_", "_share_filename_cpu_")

_address: Callable[[torch.Tensor], int] = lookup("torch.Tensor._cdata.__get__")
_fix_weakref = lookup("torch.Tensor._fix_weakref")


_storage_use_count: Callable[[int], int] | None = optional("torch._C._storage_Use_Count")
_use_count: Callable[[torch.Tensor], int] | None = optional("torch.Tensor._use_count")


def is_unshared(tensor: torch.Tensor) -> bool:
    """Whether nothing but this object refers to a tensor and to its memory; False where torch does not tell."""
    if _storage_use_count is None or _use_count is None or _use_count(tensor) != 1:
        return False
    storage = tensor.untyped_storage()
    return _storage_use_count(storage._cdata) == 2  # the tensor's and that of the object here


def implementation_of(tensor: torch.Tensor) -> int:
    """Return the address of a Python tensor's C++ object, which `torch.utils.swap_tensors` changes."""
    return _address(tensor)


def keep_object(tensor: Any) -> None:
    """Make Python own the object of a tensor obtained from a weak reference.

    Before torch 2.10 C++ may own it: the object is then emptied when no C++ code holds the tensor any more.
    """
    _fix_weakref(tensor)
