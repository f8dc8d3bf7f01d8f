"""Arguments and results of blocks: the hidden states, and other tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from actckpt import _C
from actckpt._core.storages import storages_of, tensors_in

__all__ = ["bytes_of", "exclude_from_offload", "first_tensor", "others"]


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor that gradients flow through, else the first floating-point one."""
    tensors = list(tensors_in(value))
    chosen = [tensor for tensor in tensors if tensor.requires_grad] or [t for t in tensors if t.is_floating_point()]
    return chosen[0] if chosen else None


def others(arguments: Any) -> list[Tensor]:
    """Return the tensors among arguments that share no storage with the first one: masks, biases."""
    own = {id(storage) for storage in storages_of(first_tensor(arguments))}
    return [tensor for tensor in tensors_in(arguments) if own.isdisjoint(map(id, storages_of(tensor)))]


def exclude_from_offload(arguments: Any) -> None:
    """Never offload the tensors besides the first one: several blocks may get them, and each would offload a copy."""
    for tensor in others(arguments):
        _C.note_owned(tensor)


def bytes_of(value: Any, *, without: Any = None) -> int:
    """Return the bytes of the storages of all tensors in a value, without those of `without`."""
    storages = {id(storage): storage for tensor in tensors_in(value) for storage in storages_of(tensor)}
    for tensor in tensors_in(without):
        for storage in storages_of(tensor):
            storages.pop(id(storage), None)
    return sum(storage.nbytes() for storage in storages.values())
