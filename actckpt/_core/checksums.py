"""Position-sensitive checksums and sums of the elements of a tensor, in pieces of bounded size."""

import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from actckpt._core import devices, torch_private

__all__ = [
    *("Result", "are_close", "are_close_elements", "checksum", "compact", "count_again", "is_metered", "leave_out"),
    *("sums", "uncounted"),
]

#: Elements per piece: minimum, maximum, and as a fraction of the tensor. Each element takes up to 24 temporary bytes.
_LEAST_PIECE = 1 << 15
_MOST_PIECE = 1 << 20
_PART = 64
#: The golden ratio as a 64-bit fraction: neighbouring positions get unrelated odd weights.
_MULTIPLIER = -7046029254386353131
_Context = Callable[[], AbstractContextManager[object]]
#: Contexts entered around each checksum, while their owners are alive, and whether these are meters.
_around: dict[int, tuple[weakref.WeakMethod[_Context], bool]] = {}
#: How much rounding changes a tensor, relative to its norm, at most.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
#: Sizes and strides in elements, the smallest stride first.
_Dims = list[tuple[int, int]]


def checksum(tensor: Tensor) -> Tensor:
    """Return a position-sensitive checksum of the elements, on their device. Call it paused.

    Each element counts once, however often an expanded or overlapping view shows it. Memory between elements does not
    count.
    Cost: linear in the elements in memory; up to 24 temporary bytes per element of one piece.
    """
    with uncounted():
        return _checksum(tensor)


def sums(tensor: Tensor) -> Tensor:
    """Return three sums of a floating-point tensor, on its device, for `are_close`. Call it paused.

    Two weight each element by its position, so another order changes them. The third is the sum of squares.
    """
    with uncounted():
        return _sums(tensor)


class Result:
    """A checksum or sums, on the way to the host: on a device, each would take a block of memory, which budgets count.

    Args:
        values: on the device. Nothing waits for it here.
    """

    __slots__ = ("_copied", "_values")

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copied: torch.Event | None = None
        if devices.counting(values.device) is not None:
            with uncounted():
                pinned = torch.empty_like(values, device="cpu", pin_memory=True)
                self._values = pinned.copy_(values, non_blocking=True)
            self._copied = torch.Event(values.device)
            self._copied.record(torch.accelerator.current_stream(values.device))

    def read(self) -> Tensor:
        """Return the values on the host. Waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._values.cpu()


def are_close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rounding explains the difference of two tensors with these sums. Waits for the device."""
    (*one_sums, one_square), (*other_sums, other_square) = one.tolist(), other.tolist()
    pairs = [*zip(one_sums, other_sums, strict=True), (one_square**0.5, other_square**0.5)]
    allowed = _ROUNDING.get(dtype.to_real(), 0.0) * max(pairs[-1])
    return math.isfinite(allowed) and all(abs(a - b) <= allowed for a, b in pairs)


def are_close_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether rounding explains the difference of each element. Waits for the device. Call it paused."""
    with uncounted():
        if torch.equal(one, other):
            return True
        rounding = _ROUNDING.get(one.dtype.to_real(), 0.0) if one.is_floating_point() or one.is_complex() else 0.0
        if not rounding:
            return False
        most = float(torch.nan_to_num(one.abs(), 0.0, 0.0, 0.0).max())
        return torch.allclose(one, other, rtol=0.0, atol=rounding * most, equal_nan=True)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Run the body below all dispatch modes: checksums are no operators of the program."""
    with contextlib.ExitStack() as stack:
        for context, _ in _contexts():
            stack.enter_context(context())
        stack.enter_context(torch_private.without_dispatch())
        yield


def leave_out(context: _Context, *, is_metered: bool) -> None:
    """Enter a method's context around each checksum, until `count_again` or until its owner dies."""
    key = _key(context)
    _around[key] = weakref.WeakMethod(context, lambda _: _around.pop(key, None)), is_metered


def count_again(context: _Context) -> None:
    """Stop entering this context."""
    _around.pop(_key(context), None)


def is_metered() -> bool:
    """Return whether an allocator meter is active."""
    return any(is_meter for _, is_meter in _contexts())


def _contexts() -> list[tuple[_Context, bool]]:
    contexts = [(method(), is_meter) for method, is_meter in list(_around.values())]
    return [(context, is_meter) for context, is_meter in contexts if context is not None]


def _key(context: _Context) -> int:
    return id(getattr(context, "__self__", None))


def _checksum(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    elements = _elements(tensor)
    words = elements.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(elements.element_size(), torch.int64))
    weights = _weights(words)
    for piece in map(_wide, _pieces(words, weights.numel())):
        # Odd weights: no change of a single element is lost modulo 2**64.
        total = torch.add(_weighted(piece, weights[: piece.numel()]), total, alpha=_MULTIPLIER)
    return total


def _sums(tensor: Tensor) -> Tensor:
    total = torch.zeros(3, dtype=torch.float64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    elements = _elements(tensor)
    dtype = torch.float64 if elements.dtype == torch.float64 else torch.float32
    weights = _weights(elements)
    both = torch.empty((2, weights.numel()), dtype=dtype, device=tensor.device)
    both[0] = weights
    both[1] = weights.mul_(weights)  # modulo 2**64: unrelated to the first ones
    both.mul_(2.0**-63)
    del weights
    for number, piece in enumerate(_pieces(elements, both.shape[1])):
        wide = piece.to(dtype).reshape(-1)
        total[:2] += torch.mv(both[:, : piece.numel()], wide) * (1 + number % 7)
        total[2] += torch.dot(wide, wide)
    return total


def _weights(elements: Tensor) -> Tensor:
    """Return one odd 64-bit number for each element of a piece."""
    most = min(max(elements.numel() // _PART, _LEAST_PIECE), _MOST_PIECE) // 8 * 8
    weights = torch.arange(min(most, elements.numel()), dtype=torch.int64, device=elements.device)
    return weights.mul_(_MULTIPLIER).bitwise_or_(1)


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


def _elements(tensor: Tensor) -> Tensor:
    """Return the real elements of a tensor; those that strides of 0 repeat, once."""
    dims = [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and stride]
    dims.sort(key=operator.itemgetter(1))
    offset = tensor.storage_offset()
    # Raw bytes. Only views: torch.func's wrappers give no access to their storage.
    plain = tensor.conj() if tensor.is_conj() else tensor.detach()
    plain = torch_private.neg_view(plain) if plain.is_neg() else plain
    if plain.is_complex():
        plain = torch.view_as_real(plain)
        dims = [(2, 1), *((n, 2 * stride) for n, stride in dims)]
        offset *= 2
    merged = _merged(dims)
    shape, strides = [n for n, _ in reversed(merged)], [stride for _, stride in reversed(merged)]
    return plain.as_strided(shape, strides, offset)


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
