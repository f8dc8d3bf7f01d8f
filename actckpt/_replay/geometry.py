"""Tensor geometry on a storage: windows without a reference to it, and the bytes they cover."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from actckpt._replay.lineage import Window

__all__ = ["Dims", "Geometry", "covers_all", "dims_of", "is_dense"]

#: Strides and sizes in elements of the dimensions of size above 1, largest stride first.
Dims = list[tuple[int, int]]


def dims_of(shape: Iterable[int], stride: Iterable[int]) -> Dims:
    """Return the dimensions of size above 1."""
    pairs = zip(stride, shape, strict=True)
    return sorted(((step, size) for step, size in pairs if size != 1), reverse=True)


def is_dense(dims: Dims) -> bool:
    """Whether the elements are adjacent: no gaps, no repeats."""
    expected = 1
    for stride, size in reversed(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def covers_all(tensor: Tensor, nbytes: int) -> bool:
    """Whether a tensor covers every element of its storage exactly once."""
    has_all = tensor.numel() * tensor.element_size() == nbytes and tensor.storage_offset() == 0
    return has_all and is_dense(dims_of(tensor.shape, tensor.stride()))


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
        """Return a window on all `nbytes` of a storage, in the dtype of a tensor on it if that divides them."""
        dtype = torch.uint8 if nbytes % tensor.element_size() else tensor.dtype
        return cls(dtype, (nbytes // dtype.itemsize,), (1,), 0, False, False)

    def span(self) -> tuple[int, int]:
        """Return the first byte, and the byte after the last."""
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
        """Whether all elements of `other` are within this window, which has no gaps there."""
        start, stop = self.span()
        first, last = other.span()
        has_no_gaps = is_dense(dims_of(self.shape, self.stride))
        return self == other or (has_no_gaps and start <= first and last <= stop)
