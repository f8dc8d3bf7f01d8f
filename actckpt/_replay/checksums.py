"""Position-sensitive checksums of the bytes behind a tensor, in pieces of bounded size."""

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from actckpt._core import torch_private

__all__ = ["checksum", "compact", "count_again", "is_left_out", "is_running", "leave_out"]

#: Elements per piece: minimum, maximum, and as a fraction of the tensor. Each element takes 16 temporary bytes.
_LEAST_PIECE = 1 << 15
_MOST_PIECE = 1 << 20
_PART = 64
#: The golden ratio as a 64-bit fraction: neighbouring positions get unrelated odd weights.
_MULTIPLIER = -7046029254386353131
_thread = threading.local()
_Context = Callable[[], AbstractContextManager[object]]
#: Contexts entered around each checksum, while their owners are alive: used by allocator meters.
_around: list[weakref.WeakMethod[_Context]] = []
#: Sizes and strides in elements, the smallest stride first.
_Dims = list[tuple[int, int]]


def checksum(tensor: Tensor) -> Tensor:
    """Return a position-sensitive checksum of the elements, on their device. Call it paused.

    Each element counts once, however often an expanded or overlapping view shows it. Memory between elements does not
    count.
    Cost: linear in the elements in memory; 16 temporary bytes per element of one piece.
    """
    _thread.is_running = True
    try:
        with contextlib.ExitStack() as stack:
            for context in _contexts():
                stack.enter_context(context())
            return _sum(tensor)
    finally:
        _thread.is_running = False


def is_running() -> bool:
    """Return whether this thread computes a checksum: its allocations belong to no training step."""
    return getattr(_thread, "is_running", False)


def leave_out(context: _Context) -> None:
    """Enter a method's context around each checksum, until `count_again` or until its owner dies."""
    _around.append(weakref.WeakMethod(context))


def count_again(context: _Context) -> None:
    """Stop entering this context."""
    _around.remove(weakref.WeakMethod(context))


def is_left_out() -> bool:
    """Return whether an allocator meter, which excludes checksums, is active."""
    return bool(_contexts())


def _contexts() -> list[_Context]:
    contexts = [(method, method()) for method in (*_around,)]
    for method, context in contexts:
        if context is None and method in _around:
            _around.remove(method)
    return [context for _, context in contexts if context is not None]


def _sum(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    words = _words(tensor)
    most = min(max(words.numel() // _PART, _LEAST_PIECE), _MOST_PIECE) // 8 * 8
    weights = torch.arange(min(most, words.numel()), dtype=torch.int64, device=tensor.device)
    weights.mul_(_MULTIPLIER).bitwise_or_(1)
    for piece in map(_wide, _pieces(words, most)):
        # Odd weights: no change of a single element is lost modulo 2**64.
        total = torch.add(_weighted(piece, weights[: piece.numel()]), total, alpha=_MULTIPLIER)
    return total


def _weighted(piece: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the products of two tensors of integers."""
    if piece.is_cpu and piece.dim() == 1:  # other devices have no dot product of integers
        return torch.dot(piece, weights)
    return (piece * weights.view(piece.shape)).sum()


def _wide(words: Tensor) -> Tensor:
    """Return 64-bit words: several elements at once where they are adjacent."""
    size = words.element_size()
    if words.dim() != 1 or words.stride(0) != 1 or words.numel() * size % 8:
        return words.to(torch.int64)
    is_aligned = words.storage_offset() * size % 8 == 0
    return (words if is_aligned else words.clone()).view(torch.int64)


def compact(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` without repeated elements: `compact(tensor).expand(tensor.shape)` equals it."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _pieces(words: Tensor, most: int) -> Iterator[Tensor]:
    """Yield `words` in pieces of at most `most` elements."""
    if words.numel() <= most:
        yield words
        return
    row = words[0].numel()
    for begin in range(0, words.shape[0], max(most // row, 1)):
        if row > most:
            yield from _pieces(words[begin], most)
        else:
            yield words[begin : begin + most // row]


def _words(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as integers; those that strides of 0 repeat, once."""
    size = tensor.element_size()
    dims = [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and stride]
    dims.sort(key=operator.itemgetter(1))
    offset = tensor.storage_offset()
    # Raw bytes. Only views: torch.func's wrappers give no access to their storage.
    plain = tensor.conj() if tensor.is_conj() else tensor.detach()
    plain = torch_private.neg_view(plain) if plain.is_neg() else plain
    if size > 8:
        plain = torch.view_as_real(plain)
        dims = [(2, 1), *((n, 2 * stride) for n, stride in dims)]
        offset *= 2
    merged = _merged(dims)
    shape, strides = [n for n, _ in reversed(merged)], [stride for _, stride in reversed(merged)]
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)
    return plain.view(dtype).as_strided(shape, strides, offset)


def _merged(dims: _Dims) -> _Dims:
    """Return the fewest dimensions that reach the same elements: merges those that are contiguous or overlap."""
    merged: _Dims = []
    for size, stride in dims:
        if merged:
            inner, step = merged[-1]
            if stride % step == 0 and stride // step <= inner:
                merged[-1] = inner + stride // step * (size - 1), step
                continue
        merged.append((size, stride))
    return merged
