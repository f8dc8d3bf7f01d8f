"""Memory that is kept anyway: that of parameters and buffers (NOTE [ Offload ], Rule 1)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core.functions import contents_of
from actckpt._core.sites import modules_on_stack

__all__ = ["is_owned", "keep_in_place"]


def is_owned(tensor: Tensor) -> bool:
    """Whether a leaf is a buffer or parameter, or a view of one, of a module whose forward is running."""
    address = tensor.untyped_storage().data_ptr()
    storages = (_C.reachable_storage(owned) for module in modules_on_stack() for owned in _own(module))
    return any(storage is not None and storage.data_ptr() == address for storage in storages)


def keep_in_place(function: Callable[..., Any]) -> None:
    """Never offload the parameters and buffers of a region's function.

    Args:
        function: a module or its method: the whole module counts. For another function, the modules in its closure
            count, without their submodules: that might be a whole model, at every call.
    """
    if isinstance(function, partial):
        return keep_in_place(function.func)
    owner = getattr(function, "__self__", function)
    modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else []
    for cell in getattr(function, "__closure__", None) or ():
        held = contents_of(cell)
        if isinstance(held, torch.nn.Module):
            modules.append(held)
    for module in modules:
        for owned in _own(module):
            _C.note_owned(owned)
    return None


def _own(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yield a module's own parameters and buffers."""
    for owned in (*module._parameters.values(), *module._buffers.values()):
        if owned is not None and owned.layout is torch.strided:
            yield owned
