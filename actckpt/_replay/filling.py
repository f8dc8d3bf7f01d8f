"""Memory from `empty`-like factories that recorded operators fill piece by piece.

NOTE [ Filling ]

What such a factory returns is opaque until recorded operators have written all of its bytes (Rule 4 of NOTE
[ Replay ]); a kernel that nobody records may write the rest. Often the pieces are written one after the other
(`buffer[i] = ...`). So beside the values that the storage really goes through, which are opaque, the same steps make
values that begin with memory of replay's own: a *lineage*. The write that completes the coverage makes a value that
continues the lineage, and can be replayed like any other.

Pieces are stretches of the storage without gaps, or, of a tensor that covers all of it, stretches of one dimension
(`cache[:, :, t]`). An operator that writes to other pieces is replayed too and counts for nothing. One that reads
what it changes must stay within what is covered. Anything else ends the lineage: the memory stays opaque.
"""

import bisect
from typing import TYPE_CHECKING

from torch import Tensor

from actckpt._replay.lineage import Step, Value, blank_of, redirect
from actckpt.action import Action

if TYPE_CHECKING:
    from actckpt._replay.tape import Tape

__all__ = ["UNINITIALISED", "Filling", "begin", "go_on", "proceed"]

#: Why a value of such memory is opaque.
UNINITIALISED = "uninitialised memory"

#: Where a piece lies: the dimension, -1: bytes of the storage; its start and its end.
Piece = tuple[int, int, int]


class Filling:
    """How much of a storage is covered, and the lineage that has the same there."""

    __slots__ = ("_dims", "_dtype", "_nbytes", "_spans", "adds", "lineage", "piece")

    def __init__(self, tensor: Tensor, blank: Value) -> None:
        self.lineage = blank
        #: Where the operator under way writes, and whether it writes all of it; None: it went elsewhere.
        self.piece: Piece | None = None
        self.adds: bool | None = False
        self._nbytes = blank.nbytes
        self._dtype = tensor.dtype
        #: Strides and sizes of dimensions with more than one element, largest stride first.
        self._dims = _dims(tensor)
        covers_all = tensor.numel() * tensor.element_size() == blank.nbytes and _is_dense(self._dims)
        self._spans: dict[int, list[tuple[int, int]]] = {-1: []}
        if covers_all and tensor.storage_offset() == 0:
            self._spans |= {axis: [] for axis in range(len(self._dims))}

    def piece_of(self, tensor: Tensor) -> Piece | None:
        """Return where a tensor on the storage lies, None if that is no simple piece."""
        if tensor.numel() == 0:
            return None
        dims, offset, itemsize = _dims(tensor), int(tensor.storage_offset()), tensor.element_size()
        if _is_dense(dims):
            return -1, offset * itemsize, (offset + tensor.numel()) * itemsize
        if itemsize != self._dtype.itemsize or len(self._spans) == 1:
            return None
        for axis, (stride, size) in enumerate(self._dims):
            before, after = self._dims[:axis], self._dims[axis + 1 :]
            middle = dims[axis : len(dims) - len(after)]
            length = middle[0][1] if len(middle) == 1 and middle[0][0] == stride else 1 if not middle else 0
            start = offset // stride
            fits = length and offset % stride == 0 and start + length <= size
            if fits and dims == [*before, *middle, *after]:
                return axis, start, start + length
        return None

    def has(self, piece: Piece | None) -> bool:
        """Whether all of a piece is covered."""
        if piece is None:
            return False
        axis, start, stop = piece
        spans = self._spans[axis]
        place = bisect.bisect_right(spans, start, key=lambda span: span[0]) - 1
        return place >= 0 and spans[place][1] >= stop

    def add(self, piece: Piece) -> None:
        """Note that a piece was written."""
        axis, start, stop = piece
        spans = self._spans[axis]
        first = bisect.bisect_left(spans, start, key=lambda span: span[1])
        last = bisect.bisect_right(spans, stop, key=lambda span: span[0])
        if first < last:
            start, stop = min(start, spans[first][0]), max(stop, spans[last - 1][1])
        spans[first:last] = [(start, stop)]

    def written(self, tensor: Tensor) -> str:
        """Note that the operator under way has written; returns why the storage is opaque still, if it is."""
        if self.piece_of(tensor) != self.piece:  # an `out=` that was resized
            self.adds = None
            return UNINITIALISED
        if self.adds and self.piece is not None:
            self.add(self.piece)
        return "" if self.is_full() else UNINITIALISED

    def is_full(self) -> bool:
        """Whether all of the storage is covered."""
        sizes = {-1: self._nbytes} | {axis: size for axis, (_, size) in enumerate(self._dims)}
        return any(spans == [(0, sizes[axis])] for axis, spans in self._spans.items())


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(((stride, size) for stride, size in pairs if size != 1), reverse=True)


def _is_dense(dims: list[tuple[int, int]]) -> bool:
    """Whether elements follow each other without gaps."""
    expected = 1
    for stride, size in reversed(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def begin(tape: "Tape", result: object) -> None:
    """Note that an empty factory returned `result`."""
    value = tape.value_of(result) if type(result) is Tensor else None
    if value is not None and value.nbytes and _is_recomputed(value):
        if tape.filling is None:
            tape.filling = {}
        tape.filling[value] = Filling(result, blank_of(value, UNINITIALISED))  # type: ignore[arg-type]


def _is_recomputed(value: Value) -> bool:
    return value.action is None or value.action is Action.RECOMPUTE


def proceed(tape: "Tape", step: Step, written: list[Tensor], why_opaque: str) -> Filling | None:
    """Let a step that is about to write continue the lineage of what it writes to; None: it does or can not."""
    value = tape.value_of(written[0]) if len(written) == 1 else None
    filling = tape.filling.pop(value, None) if value is not None and tape.filling is not None else None
    operator = step.operator
    if filling is None or value is None or why_opaque or operator.reshapes_storage or step.inputs.count(value) != 1:
        return None
    filling.piece = filling.piece_of(written[0])
    filling.adds = operator.overwrites
    if not operator.overwrites and not filling.has(filling.piece):
        return None
    redirect(step, value, filling.lineage)
    return filling


def go_on(tape: "Tape", step: Step, filling: Filling, tensor: Tensor) -> None:
    """Continue the lineage beside the value that a step made and that is not covered yet."""
    storage = tensor.untyped_storage()
    block = tape.blocks.get(id(storage))  # its version is not counted up yet: `value_of` would look at it
    value = block.value if block is not None and block.storage() is storage else None
    if value is None or filling.adds is None or not _is_recomputed(value) or tape.why_never(value):
        return
    lineage = tape.new_value(value.nbytes, value.device)
    lineage.action, lineage.operator = value.action, value.operator
    step.add_output(lineage, (1, 0))
    filling.lineage = lineage
    assert tape.filling is not None  # `proceed` took the lineage from there
    tape.filling[value] = filling
