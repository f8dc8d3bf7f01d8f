"""How changes of a tensor are detected: by its version, its memory, or a copy of its bytes."""

import torch
from torch import Tensor

from actckpt._C import memory_of
from actckpt._core import torch_private

__all__ = ["Watched", "has_same_bytes", "own_copy", "version_of"]


class Watched:
    """A tensor that must be unchanged for reruns (NOTE [ Inputs of a region ], Rules 1 and 6)."""

    __slots__ = ("_copy", "_implementation", "_memory", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self._memory = memory_of(tensor)
        self._implementation = torch_private.implementation_of(tensor)
        self._copy = own_copy(tensor) if tensor.is_inference() else None

    def is_changed(self) -> bool:
        """Whether it was changed in place."""
        return version_of(self.tensor) != self.version or (
            self._copy is not None and not has_same_bytes(self._copy, self.tensor)
        )

    def has_other_memory(self) -> bool:
        """Whether it was given other memory, which no version counts."""
        is_swapped = torch_private.implementation_of(self.tensor) != self._implementation
        return is_swapped or memory_of(self.tensor) is not self._memory

    def hold_instead(self, alias: Tensor) -> None:
        """Hold an alias instead of the tensor."""
        self.tensor = alias
        self._implementation = torch_private.implementation_of(alias)


def version_of(value: object) -> int:
    """Return the version of a tensor; 0 if it has none."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def own_copy(tensor: Tensor) -> Tensor:
    """Return a normal tensor with the contents of an inference tensor, or of such a copy, on its own memory."""
    with torch.inference_mode(False), torch.no_grad():
        copied = tensor.clone()
        if tensor.layout is torch.strided and copied.stride() != tensor.stride():
            storage = tensor.untyped_storage().clone()
            copied = tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return copied.requires_grad_(tensor.requires_grad)


def has_same_bytes(copied: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor still equals its copy."""
    if copied.shape != tensor.shape or copied.dtype != tensor.dtype:
        return False
    with torch.no_grad():
        one, other = (t.to_dense().contiguous().reshape(-1).view(torch.uint8) for t in (copied, tensor))
        return torch.equal(one, other)
