"""The saved-tensor hooks of a region: a handle for every tensor that autograd saves, and the way back."""

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from actckpt import _frames
from actckpt.action import Action, SavedTensorInfo
from actckpt.runtime import torch_private
from actckpt.runtime.counters import counters
from actckpt.runtime.replay import execute
from actckpt.runtime.replay.execute import changed_error
from actckpt.runtime.replay.lineage import Block, Value, Window, window_of
from actckpt.runtime.replay.tape import Paused, Tape, version_of

__all__ = ["Handle", "pack", "unpack"]


_NO_SWAP: Any = nullcontext()


class Handle:
    """A saved tensor: a window on a value."""

    __slots__ = ("__weakref__", "tape", "task", "window")

    def __init__(self, tape: Tape, window: Window) -> None:
        self.tape = tape
        self.window = window
        #: The backward that unpacked it last.
        self.task = -1


class Stays:
    """A saved tensor that is held as it is: a parameter, or one that cannot be taken apart."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(tensor)

    def unpack(self) -> Tensor:
        """Return a fresh alias."""
        if version_of(self.tensor) != self.version:
            raise changed_error(self.tensor.shape, self.tensor.dtype, version_of(self.tensor), self.version)
        return self.tensor if self.tensor.is_leaf else self.tensor.detach()


class TakenApart:
    """A tensor subclass whose inner tensors were packed one by one."""

    __slots__ = ("context", "inner", "kind", "shape", "stride", "tensor", "version")

    def __init__(self, tape: Tape, tensor: Any) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.inner = {name: pack(tape, getattr(tensor, name)) for name in names}
        self.kind = type(tensor)
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.tensor = weakref.ref(tensor)
        self.version = version_of(tensor)

    def unpack(self) -> Tensor:
        """Build the subclass again from its inner tensors."""
        outer = self.tensor()
        if outer is not None and version_of(outer) != self.version:
            raise changed_error(self.shape, outer.dtype, version_of(outer), self.version)
        inner = {name: unpack(packed) for name, packed in self.inner.items()}
        tensor: Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)
        return tensor


def pack(tape: Tape, tensor: Tensor) -> Handle | Stays | TakenApart:
    """Pack hook: returns what autograd holds in the place of `tensor`."""
    if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
        if hasattr(type(tensor), "__tensor_flatten__"):
            with Paused():
                return TakenApart(tape, tensor)
        return Stays(tensor)
    value = tape.value_of(tensor)
    if value is None or value.is_parameter:
        with Paused():
            return Stays(tensor)
    if not value.handles:
        _decide(tape, value, tensor)
    handle = Handle(tape, window_of(tensor, value))
    value.handles.append(weakref.ref(handle))
    return handle


def unpack(packed: Handle | Stays | TakenApart) -> Tensor:
    """Unpack hook: returns a fresh alias of the saved tensor."""
    if not isinstance(packed, Handle):
        return packed.unpack()
    tape, window = packed.tape, packed.window
    value = window.value
    swap = _NO_SWAP if tape.swap < 0 or value.is_at_hand() else _frames.Swap(tape.swap)
    with swap, tape.lock:
        base = execute.bytes_of(tape, value)
        packed.task = torch_private.current_graph_task_id()
        if value.cached is not None and not execute.is_pending(value, packed.task):
            value.cached = None
    with Paused():
        tensor = execute.on(base, window)
    if tape.is_open:
        storage = tensor.untyped_storage()
        known = tape.blocks.get(id(storage))
        if known is None or known.storage() is not storage:
            tape.blocks[id(storage)] = Block(storage, value)  # Rule 9
    return tensor


def _decide(tape: Tape, value: Value, tensor: Tensor) -> None:
    """Decide what becomes of a value that autograd saves for the first time."""
    action = value.action
    if action is None:
        action = value.action = tape.choice.for_value(info_of(tape, value, tensor))  # type: ignore[misc]
    tape.saved.append(weakref.ref(value))
    if action is Action.RECOMPUTE and not tape.can_replay(value):
        counters.add("kept_opaque", 0 if value.is_input else 1)
        action = Action.KEEP
    if action is Action.RECOMPUTE:
        if value.is_candidate:
            value.spare = tensor
            tape.candidates.append(value)
        return
    value.step = None
    if action is Action.OFFLOAD:
        tape.offload(value, tensor)
    elif value.held is None:
        value.held = tensor
        tape.holding.append(value)


def info_of(tape: Tape, value: Value, tensor: Tensor) -> SavedTensorInfo:
    """Return what a policy is told about a value."""
    return SavedTensorInfo(
        op=value.step.operator.func if value.step is not None else None,
        index=value.index,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        device=tensor.device,
        nbytes=value.nbytes,
        is_input=value.is_input,
        is_parameter=value.is_parameter,
        replayable=tape.can_replay(value),
        module=None,
    )


def settle(tape: Tape) -> None:
    """Close a tape: release what no saved tensor needs, hold the rest under watch (Rules 7 and 11)."""
    tape.is_open = False
    tape.blocks.clear()
    _settle_candidates(tape)
    held = [weakref.ref(value) for value in tape.holding]
    tape.holding.clear()
    tape.saved.clear()
    for reference in held:
        value = reference()
        if value is None or value.held is None:
            continue
        with Paused():
            _settle_one(tape, value)


def _settle_one(tape: Tape, value: Value) -> None:
    held = value.held
    assert held is not None
    if value.is_parameter:
        return
    alias = held.detach()
    if value.action is Action.OFFLOAD and not value.is_input:
        tape.offload(value, alias)
    elif tape.outer is not None:
        pack_outer, unpack_outer = tape.outer
        packed = pack_outer(alias)
        value.stored = lambda: unpack_outer(packed)
        value.held = None
    else:
        value.held = alias
        value.version = version_of(alias)


def _settle_candidates(tape: Tape) -> None:
    """Keep a dropped value where recomputing it would hold more bytes than keeping it."""
    candidates, tape.candidates = tape.candidates, []
    if not candidates:
        return
    undecided = set(map(id, candidates))
    needed: set[int] = set()
    for reference in tape.saved:
        value = reference()
        if value is not None and id(value) not in undecided:
            _add_frontier(value, needed)
    for value in sorted(candidates, key=lambda value: -value.nbytes):
        spare, value.spare = value.spare, None
        if spare is None or value.is_at_hand():
            continue
        if not any(handle() is not None for handle in value.handles):
            continue
        sizes: dict[int, int] = {}
        _add_frontier(value, set(), sizes)
        extra = {key: size for key, size in sizes.items() if key not in needed}
        if sum(extra.values()) > value.nbytes:
            value.held = spare
            value.step = None
            tape.holding.append(value)
        else:
            needed |= set(extra)


def _add_frontier(value: Value, found: set[int], sizes: dict[int, int] | None = None) -> None:
    """Add the ids of the values at hand that `value` is replayed from, or of itself."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if current.is_at_hand() or current.step is None:
            found.add(id(current))
            if sizes is not None and not current.is_parameter:
                sizes[id(current)] = current.nbytes
        else:
            pending.extend(current.step.inputs)
