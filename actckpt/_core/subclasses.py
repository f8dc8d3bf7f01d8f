"""Tensor subclasses: what they hold is packed part by part, and they are built again from it.

NOTE [ Subclasses ]

Rule 1. A subclass says by `__tensor_flatten__` what it is made of. The names that it gives need not be those of
        tensors: a DTensor names its mesh. What is no tensor is held as it is. Parts may be subclasses themselves.
Rule 2. The version counters of the parts do not tell what is done to the outer tensor, so that itself is asked, as
        long as it lives.
Rule 3. What a collective is still writing is waited for: it may be read at once.
Rule 4. What says how a nested tensor is divided is the name of its sizes: the same tensor must come back.
Rule 5. Where all parts come back as the very objects that they were, so does the outer tensor. Else it is built again,
        and has the Python attributes of the saved one, as plain tensors do (csrc/core/saved_identity.h).
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from actckpt._core import torch_private
from actckpt._core.messages import changed_in_place
from actckpt._core.tensor_changes import version_of

__all__ = ["FlattenedSubclass", "parts_of", "plain_parts"]


def parts_of(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Return what a subclass with `__tensor_flatten__` is made of, by name, and the context to build it with."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor is made of: a shard, of one that several ranks have together."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    parts, _ = parts_of(tensor)
    for part in parts.values():
        if isinstance(part, Tensor):
            yield from plain_parts(part)


class FlattenedSubclass:
    """A saved tensor subclass whose parts were packed one by one.

    Args:
        tensor: of a type with `__tensor_flatten__`.
        pack: returns what stands for a part that is a tensor.
        unpack: returns the part that was packed.
    """

    __slots__ = (
        *("_attributes", "_context", "_kind", "_needs_grad", "_packed", "_same", "_shape", "_stride"),
        *("_tensor", "_unpack", "_version"),
    )

    def __init__(self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        torch_private.wait_for_collective(tensor)
        parts, context = parts_of(tensor)
        self._same: dict[str, Any] = {}
        self._packed: dict[str, Any] = {}
        for name, part in parts.items():
            if isinstance(part, Tensor) and (name == "_values" or not tensor.is_nested):  # Rule 4
                self._packed[name] = pack(part)
            else:
                self._same[name] = part
        self._attributes = self._attributes_of(tensor)
        self._needs_grad = tensor.requires_grad
        self._unpack = unpack
        self._kind: Any = type(tensor)
        self._context = context
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._tensor = weakref.ref(tensor)
        self._version = version_of(tensor)

    def unpack(self) -> Tensor:
        """Build the subclass again from its parts."""
        outer = self._tensor()
        if outer is not None and version_of(outer) != self._version:
            raise changed_in_place(self._shape, outer.dtype, version_of(outer), self._version)
        parts = self._same | {name: self._unpack(packed) for name, packed in self._packed.items()}
        is_whole = outer is not None and all(parts[name] is getattr(outer, name) for name in self._packed)
        if outer is not None and is_whole and self._packed and not (self._needs_grad or outer.requires_grad):
            return outer
        tensor: Tensor = self._kind.__tensor_unflatten__(parts, self._context, self._shape, self._stride)
        for name, value in (self._attributes if outer is None else self._attributes_of(outer)).items():
            vars(tensor).setdefault(name, value)
        return tensor

    def _attributes_of(self, tensor: Tensor) -> dict[str, Any]:
        """Return the Python attributes that are no parts."""
        parts = {*self._same, *self._packed}
        return {name: value for name, value in vars(tensor).items() if name not in parts}
