"""Tensor subclasses: their inner tensors are packed one by one, and the subclass is rebuilt from them.

`__tensor_flatten__` names the parts of a subclass. Not all parts are tensors (a DTensor names its mesh); others are
held as they are. Parts may be subclasses themselves. The version counters of the parts do not count changes of the
outer tensor, so its own version is checked too, while it is alive. If a collective still writes a part, packing waits
for it, since the part may be read at once.

The offsets of a nested tensor identify its sizes, so the same offsets tensor must come back. If all parts come back as
the same objects, so does the outer tensor. Otherwise it is rebuilt, with the Python attributes of the saved one, as for
plain tensors (csrc/core/saved_identity.h).
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
    """Return the parts of a subclass with `__tensor_flatten__` by name, and the context for rebuilding it."""
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a tensor, such as the local shard of a DTensor."""
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
        pack: packs a tensor part.
        unpack: restores a packed part.
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
            # The offsets of a nested tensor must come back as the same object.
            if isinstance(part, Tensor) and (name == "_values" or not tensor.is_nested):
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
        """Rebuild the subclass from its parts."""
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
