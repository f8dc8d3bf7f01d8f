"""What the hooks around a region hold for it.

NOTE [ Outer hooks ]

A region inside other saved-tensor hooks passes them the tensors that it must hold (NOTE [ Replay ], Rule 9).

Rule 1. It packs the shapes that autograd saved: of several tensors on one storage, those that no other one contains.
If replay reads more bytes, it packs the tensor that the region got, or the whole storage.
Rule 2. A leaf input is packed as the same object. Everything else is packed as an alias: a hook that holds an output
would keep its own graph alive.
Rule 3. Hooks may return other bytes (a bfloat16 round trip) and other strides. Replay starts from what they return. A
checksum of the packed tensor tells whether the region can be audited at all.
Rule 4. Each backward unpacks each tensor once, as torch's checkpoint requires.
Rule 5. What is packed, and in which order, must not depend on which of several inputs is a view of which. A rerun
around the region matches tensors by position, and its inputs may be related differently.
Rule 6. If decisions depend on module names and the hooks belong to a checkpoint, an empty tensor is packed first. Its
size encodes which values stay. If names differ in the rerun (part of the model was called alone in between), the region
may keep other values of the same shapes. The size then differs, so the checkpoint raises.
Rule 7. In a checkpoint, a leaf that requires grad is packed only if it is a positional argument, as torch's checkpoint
does. Autograd's graph holds the others. `get_all_leaves` lists them and explains which hooks this concerns.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt._C import on, when_backward_ends
from actckpt._core import torch_private
from actckpt._core.checksums import Result
from actckpt._core.hooks import is_of_checkpoint
from actckpt._replay import audit
from actckpt._replay.call_sites import Site
from actckpt._replay.geometry import Geometry
from actckpt._replay.lineage import Value, Window
from actckpt._replay.paused import Paused
from actckpt._replay.tape import Tape
from actckpt.errors import ActckptError

__all__ = ["OuterPacked", "Reads", "pack_outer", "pack_outer_token", "reads_of", "saved_piece"]

_TOKEN_BITS = 40


class Reads:
    """What the steps behind dropped values read of one storage."""

    __slots__ = ("needs_all", "windows")

    def __init__(self) -> None:
        self.windows: dict[Geometry, None] = {}
        #: A step writes to a copy of the storage.
        self.needs_all = False


def reads_of(tape: Tape) -> dict[Value, Reads]:
    """Return what replay will read of values that are available when the region closes."""
    by_value: dict[Value, Reads] = {}
    seen: set[Value] = set()
    pending = [value for value in (reference() for reference in tape.saved) if value is not None and value.is_wanted()]
    while pending:
        value = pending.pop()
        if value in seen or value.step is None or value.is_available():
            continue
        seen.add(value)
        step = value.step
        for window in _windows_in([step.args, *(step.kwargs or {}).values()]):
            reads = by_value.setdefault(window.value, Reads())
            reads.windows[Geometry.of(window)] = None
            reads.needs_all |= window.value in step.written
        pending.extend(step.inputs)
    return by_value


def _windows_in(arguments: Iterable[Any]) -> Iterator[Window]:
    for argument in arguments:
        if isinstance(argument, Window):
            yield argument
        elif isinstance(argument, list):
            yield from _windows_in(argument)


def _pieces(value: Value, reads: Reads, tensor: Tensor) -> list[Geometry]:
    """Return the pieces in which to pack the bytes of a value (Rule 1)."""
    whole, every = Geometry.of_tensor(tensor), Geometry.of_bytes(value.nbytes, tensor)
    if value.is_input:
        whole = _in_order(whole)
    pieces = list(dict.fromkeys(Geometry.of(window) for window in value.windows()))
    needed = [*reads.windows, every] if reads.needs_all else list(reads.windows)
    missing = [
        window for window in needed if not any(piece.covers(window) and not piece.has_overlaps() for piece in pieces)
    ]
    if missing or not pieces:
        pieces.append(whole if all(whole.covers(window) for window in missing) else every)
    ranked = sorted(pieces, key=lambda piece: piece != _in_order(piece))
    return [
        piece
        for i, piece in enumerate(ranked)
        if not any(
            j != i and other.covers(piece) and (j < i or not piece.covers(other)) for j, other in enumerate(ranked)
        )
    ]


def _in_order(geometry: Geometry) -> Geometry:
    """Return the same elements with the largest stride first (Rule 5)."""
    pairs = sorted(zip(geometry.stride, geometry.shape, strict=True), reverse=True)
    return geometry._replace(shape=tuple(size for _, size in pairs), stride=tuple(step for step, _ in pairs))


def pack_outer_token(tape: Tape, values: Iterable[Value]) -> None:
    """Pack an empty tensor that encodes which values stay, where a rerun may keep others (Rule 6)."""
    if tape.outer is None or not is_of_checkpoint(tape.outer):
        return
    if not tape.choice.asks_places and not tape.opaque_names:
        return
    token = hash(tuple(value.key for value in values if not value.is_input)) & ((1 << _TOKEN_BITS) - 1)
    with Paused():
        tensor = torch.empty(0, token, dtype=torch.uint8, device="cpu")
    with torch.no_grad():
        tape.token = tape.outer[0](tensor)


class _Piece(NamedTuple):
    geometry: Geometry
    packed: Any
    #: Checksum of the packed tensor, None: not audited.
    checksum: Result | None


def pack_outer(tape: Tape, value: Value, given: Tensor, reads: Reads | None) -> "OuterPacked":
    """Pass the bytes of a value to the outer hooks.

    Args:
        tape: of a region that has just closed.
        value: the value to pack.
        given: the tensor on its bytes that the region got or kept.
        reads: what dropped values are replayed from it.
    """
    assert tape.outer is not None
    pack, unpack = tape.outer
    as_given = Geometry.of_tensor(given)
    pieces = []
    for geometry in _pieces(value, reads or Reads(), given):
        with Paused():
            is_object = geometry == as_given and value.is_input and given.grad_fn is None
            tensor = given if is_object else on(given.detach(), geometry)
            is_audited = tape.is_audited and audit.can_compare(tensor)
            checksum = Result(audit.checksum(tensor)) if is_audited else None
        with torch.no_grad():
            pieces.append(_Piece(geometry, pack(tensor), checksum))
    return OuterPacked(pieces, value.nbytes, unpack, tape.site)


class OuterPacked:
    """Bytes of one value that the outer hooks hold. A call returns a tensor on a storage with all bytes that are
    needed."""

    __slots__ = ("__weakref__", "_base", "_found", "_nbytes", "_pieces", "_site", "_task", "_unpack")

    def __init__(self, pieces: Sequence[_Piece], nbytes: int, unpack: Callable[[Any], Tensor], site: Site) -> None:
        self._pieces = list(pieces)
        self._nbytes = nbytes
        self._unpack = unpack
        self._site = site
        #: Pieces that backward `task` has unpacked (Rule 4), and the assembled tensor.
        self._task = -1
        self._found: dict[int, Tensor] = {}
        self._base: Tensor | None = None

    def piece(self, window: Window) -> Tensor | None:
        """Return a saved tensor as the hooks returned it; None: it lies within the bytes that a call returns.

        May run user code again, so the caller must not be paused.
        """
        self._begin()
        geometry = Geometry.of(window)
        if self._base is not None and not geometry.has_overlaps():
            return None
        return next((self._take(i) for i, piece in enumerate(self._pieces) if piece.geometry == geometry), None)

    def __call__(self) -> Tensor:
        """Return a tensor on the bytes. May run user code again, so the caller must not be paused."""
        self._begin()
        if self._base is not None:
            return self._base
        taken = [
            (piece.geometry, self._take(i)) for i, piece in enumerate(self._pieces) if not piece.geometry.has_overlaps()
        ]
        with Paused():
            base = self._put_together(taken)
        if self._task != -1:
            self._base, self._found = base, {}
        return base

    def _begin(self) -> None:
        task = torch_private.current_graph_task_id()
        if task == self._task and task != -1:
            return
        self._task = task
        self._found, self._base = {}, None
        if task != -1:
            when_backward_ends(partial(_forget, weakref.ref(self), task))

    def _take(self, i: int) -> Tensor:
        if i in self._found:
            return self._found[i]
        geometry, packed, checksum = self._pieces[i]
        tensor = self._unpack(packed)
        if tuple(tensor.shape) != geometry.shape or tensor.dtype is not geometry.dtype:
            raise ActckptError(
                f"The saved-tensor hooks around a region gave back a tensor of shape {tuple(tensor.shape)}, "
                f"{tensor.dtype}, for one of shape {geometry.shape}, {geometry.dtype}.\nAn unpack hook must return a "
                "tensor of the shape and type that the pack hook was given."
            )
        if checksum is not None:
            with Paused():
                if not torch.equal(audit.checksum(tensor).cpu(), checksum.read()):
                    self._site.has_other_hooks = True  # Rule 3
        if self._task != -1:
            self._found[i] = tensor
        return tensor

    def _put_together(self, taken: list[tuple[Geometry, Tensor]]) -> Tensor:
        first, tensor = taken[0]
        has_all = len(taken) == 1 and tensor.untyped_storage().nbytes() == self._nbytes
        if has_all and Geometry.of_tensor(tensor) == first:
            return tensor.detach()
        memory = torch.empty(self._nbytes, dtype=torch.uint8, device=tensor.device)
        for geometry, tensor in taken:
            on(memory, geometry).copy_(tensor)
        return memory

    def forget(self, task: int) -> None:
        """Drop what backward `task` unpacked."""
        if self._task == task:
            self._found, self._base = {}, None


def saved_piece(stored: object, window: Window) -> Tensor | None:
    """Return a saved tensor that the outer hooks hold, None if its bytes are elsewhere."""
    return stored.piece(window) if isinstance(stored, OuterPacked) else None


def _forget(reference: "weakref.ref[OuterPacked]", task: int) -> None:
    held = reference()
    if held is not None:
        held.forget(task)
