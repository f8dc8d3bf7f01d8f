"""Windows on a storage that refer to nothing."""

from typing import NamedTuple

import torch
from torch import Tensor

from actckpt._replay.lineage import Window

__all__ = ["Geometry"]


class Geometry(NamedTuple):
    """A window on some storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, window: Window) -> "Geometry":
        return cls(window.dtype, window.shape, window.stride, window.offset, window.is_conj, window.is_neg)

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> "Geometry":
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    @classmethod
    def of_bytes(cls, nbytes: int, tensor: Tensor) -> "Geometry":
        """Return one of all `nbytes` of a storage, in the type of a tensor on it if that fits."""
        dtype = torch.uint8 if nbytes % tensor.element_size() else tensor.dtype
        return cls(dtype, (nbytes // dtype.itemsize,), (1,), 0, False, False)

    def span(self) -> tuple[int, int]:
        """Return the first byte, and the one after the last."""
        if 0 in self.shape:
            return 0, 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize

    def has_overlaps(self) -> bool:
        """Whether several elements may share bytes."""
        reach = 0
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if step <= reach:
                    return True
                reach += (size - 1) * step
        return False

    def covers(self, other: "Geometry") -> bool:
        """Whether all elements of `other` are within this, which has no gaps there."""
        start, stop = self.span()
        first, last = other.span()
        numel = torch.Size(self.shape).numel()
        is_dense = numel * self.dtype.itemsize == stop - start and not self.has_overlaps()
        return self == other or (is_dense and start <= first and last <= stop)
