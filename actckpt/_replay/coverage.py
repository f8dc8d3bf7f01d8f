"""How much of a storage recorded operators have written: see NOTE [ Filling ] in `filling`."""

import bisect

from torch import Tensor

from actckpt._replay.geometry import Geometry, dims_of, is_dense
from actckpt._replay.lineage import Value, Window

__all__ = ["UNINITIALISED", "Filling"]

#: Why a value of such memory is opaque.
UNINITIALISED = "uninitialised memory"

#: Where a piece lies: the dimension, -1: bytes of the storage; its start and its end.
Piece = tuple[int, int, int]


class Filling:
    """How much of a storage is covered, and the lineage that has the same there."""

    __slots__ = ("_dims", "_dtype", "_nbytes", "_spans", "adds", "lineage", "piece")

    def __init__(self, window: Window, blank: Value) -> None:
        self.lineage = blank
        #: Where the operator under way writes, and whether it writes all of it; None: it went elsewhere.
        self.piece: Piece | None = None
        self.adds: bool | None = False
        self._nbytes = blank.nbytes
        self._dtype = window.dtype
        self._dims = dims_of(window.shape, window.stride)
        self._spans: dict[int, list[tuple[int, int]]] = {-1: []}
        if is_dense(self._dims) and Geometry.of(window).span() == (0, blank.nbytes):
            self._spans |= {axis: [] for axis in range(len(self._dims))}

    def piece_of(self, tensor: Tensor) -> Piece | None:
        """Return where a tensor on the storage lies, None if that is no simple piece."""
        if tensor.numel() == 0:
            return None
        dims = dims_of(tensor.shape, tensor.stride())
        offset, itemsize = int(tensor.storage_offset()), tensor.element_size()
        if is_dense(dims):
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
