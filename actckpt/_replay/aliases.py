"""Tensors with version counters of their own on the same bytes: each of them may tell of a change.

Autograd looks at the counter of the tensor that it saved. Views share it with their base, but `Tensor.data`, results of
`unsafe_chunk` and of operators that return an alias without saying so have their own. The tape watches the one that it
saw last; the others that it saw before are noted here, and watched too once the region is closed.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from actckpt._C import look_at
from actckpt._core.watched import version_of
from actckpt._replay.lineage import Value, Window
from actckpt._replay.paused import Paused
from actckpt._replay.wrappers import Witness
from actckpt.errors import SavedTensorChangedError

__all__ = ["WHY_INFERENCE", "Roots", "Watched", "changed_error", "note_root"]

#: Why what is made from an inference tensor is never made again: it has no version.
WHY_INFERENCE = "made from an inference tensor: nobody tells when it changes"

#: For values that were seen through several: all but the last, with their versions.
Roots = weakref.WeakKeyDictionary[Value, list[tuple[weakref.ref[Tensor], int]]]


def note_root(roots: Roots, value: Value, tensor: Tensor) -> bool:
    """Note that `value` is seen through `tensor` now, and was through another one; False if its bytes changed since."""
    root = tensor if tensor._base is None else tensor._base
    others = roots.setdefault(value, [])
    expected = next((version for other, version in others if other() is root), None)
    others[:] = [(other, version) for other, version in others if other() is not None and other() is not root]
    if value.root is not None:
        others.append((value.root, value.version))
    if expected is not None and version_of(tensor) > expected:
        return False
    look_at(value, tensor)
    return True


class Watched:
    """Bytes of a closed region that several tensors tell of. Nothing else is asked about them.

    Args:
        get: returns a tensor on the bytes.
        roots: tensors on the same storage, and their versions.
        wrappers: tensors that are made of the bytes, and their versions.
    """

    __slots__ = ("_bytes", "_watched", "_wrappers")

    def __init__(
        self, get: Callable[[], Tensor], roots: Iterable[tuple[Tensor, int]], wrappers: Iterable[Witness] = ()
    ) -> None:
        self._bytes = get
        self._wrappers = list(wrappers)
        with Paused():
            self._watched = [(root.detach(), version) for root, version in roots]

    def __call__(self) -> Tensor:
        """Return a tensor on the bytes, all of which are needed."""
        return self._checked(0, torch.iinfo(torch.int64).max)

    def under(self, window: Window) -> Tensor:
        """Return a tensor on the bytes, of which only those in a window are needed."""
        return self._checked(*_span(window.shape, window.stride, window.offset, window.dtype.itemsize))

    def _checked(self, start: int, stop: int) -> Tensor:
        for root, version in self._watched:
            first, last = _span(root.shape, root.stride(), int(root.storage_offset()), root.element_size())
            if first < stop and start < last and version_of(root) != version:
                raise changed_error(root.shape, root.dtype, version_of(root), version)
        for reference, version in self._wrappers:
            wrapper = reference()
            if wrapper is not None and version_of(wrapper) != version:
                raise changed_error(wrapper.shape, wrapper.dtype, version_of(wrapper), version)
        return self._bytes()


def _span(shape: Iterable[int], stride: Iterable[int], offset: int, itemsize: int) -> tuple[int, int]:
    """Return the first byte of a storage that a tensor covers, and the one after the last."""
    sizes = list(shape)
    if 0 in sizes:
        return 0, 0
    length = sum((size - 1) * step for size, step in zip(sizes, stride, strict=True)) + 1
    return offset * itemsize, (offset + length) * itemsize


def changed_error(shape: torch.Size, dtype: torch.dtype, version: int, expected: int) -> SavedTensorChangedError:
    """Word a saved tensor whose bytes changed in place."""
    return SavedTensorChangedError(
        "One of the variables needed for gradient computation has been modified by an inplace operation after its "
        f"region closed: tensor of shape {tuple(shape)}, {dtype}.\nIt is at version {version}; expected version "
        f"{expected}.\nUse the out-of-place operator, clone the tensor before changing it, or change it inside the "
        "region."
    )
