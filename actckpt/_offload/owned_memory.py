"""Which memory somebody else keeps anyway: that of parameters and buffers (Rule 1 of NOTE [ Offload ])."""

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
    """Whether a leaf is a buffer or parameter of a module whose forward runs, or a view of one."""
    address = tensor.untyped_storage().data_ptr()
    storages = (_C.reachable_storage(owned) for module in modules_on_stack() for owned in _own(module))
    return any(storage is not None and storage.data_ptr() == address for storage in storages)


def keep_in_place(function: Callable[..., Any]) -> None:
    """Never move the parameters and buffers of what a region calls.

    Args:
        function: a module or a method of one, all of which is meant; of another function those modules that
            its closure holds, without the modules in them: that may be a whole model, at every call.
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
    """Yield what a module itself owns."""
    for owned in (*module._parameters.values(), *module._buffers.values()):
        if owned is not None and owned.layout is torch.strided:
            yield owned
