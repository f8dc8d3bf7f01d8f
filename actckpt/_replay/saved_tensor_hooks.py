"""The saved-tensor hooks of a region: pack returns a handle for every saved tensor, unpack restores the tensor."""

import functools
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from actckpt import _C
from actckpt._C import unmoved
from actckpt._core import torch_private
from actckpt._core.sites import warn_user
from actckpt._core.subclasses import FlattenedSubclass
from actckpt._core.tensor_changes import version_of
from actckpt._core.warning_texts import WarningText
from actckpt._replay import aliases, casts, wrappers
from actckpt._replay.lineage import Handle, Value, window_of
from actckpt._replay.outer_hooks import Reads, pack_outer, pack_outer_token, reads_of
from actckpt._replay.paused import Paused
from actckpt._replay.tape import Tape
from actckpt.action import Action

__all__ = ["close", "is_much", "pack", "pack_other", "unpack", "unpacked_inside"]


#: What pack returns to autograd.
_Packed: TypeAlias = "Handle | _C.OffloadHandle"

#: Warn once if more than one part in this many of the bytes to recompute cannot be replayed ...
_OPAQUE_SHARE = 10
#: ... and they are at least this many.
_OPAQUE_BYTES = 1 << 20
#: Number of backwards inside one open region from which on they are taken for training steps.
_BACKWARDS_INSIDE = 3
_MANY_OPAQUE = WarningText(
    "{opaque} of {total} MiB that the policy of this region wants to recompute cannot be replayed, since no recorded "
    "operator made them; they are kept.",
    "Use actckpt.checkpoint(fn, ...) without a policy, which runs the function again and supports any kernel. "
    "r.report() names the values.",
    per="region of the program",
)
_STILL_OPEN = WarningText(
    "{backwards} backwards ran inside of one region, which is still open: it holds memory until it closes.",
    "End the `with actckpt.region(...)` block before calling backward.",
    per="region of the program",
)


def pack(tape: Tape, tensor: Tensor) -> _Packed:
    """Pack hook: return the handle that autograd stores instead of `tensor`."""
    packed: _Packed = _C.pack_recorded(tape, tensor)
    return packed


def pack_other(tape: Tape, tensor: Tensor, is_plain: bool) -> "_C.OffloadHandle":
    """Pack a subclass, or a tensor whose storage cannot be read."""
    with Paused():
        if not is_plain and hasattr(type(tensor), "__tensor_flatten__"):
            wrappers.note(tape, tensor)
            return FlattenedSubclass(tensor, functools.partial(pack, tape), unpack)
        return unmoved(tensor)


def point_at(tape: Tape, handle: Handle, tensor: Tensor) -> None:
    """Let a handle refer to what its tensor holds now."""
    value = tape.value_of(tensor)
    assert value is not None
    if not value.num_handles:
        _C.decide(tape, value, tensor)
    handle.window = window_of(tensor, value)
    handle.alias = None
    handle.audit = None
    value.add_handle(handle)


def unpack(packed: _Packed) -> Tensor:
    """Unpack hook: return a fresh alias of the saved tensor."""
    return _C.unpack_recorded(packed)


def unpacked_inside(tape: Tape, value: Value) -> None:
    """Prepare for a saved tensor that is unpacked while its region is open."""
    tape.audit_late(value)
    if not torch.is_grad_enabled():
        _note_backward_inside(tape)


def close(tape: Tape) -> None:
    """Close a tape: release what no saved tensor needs, watch the rest for changes (Rules 6 and 9)."""
    if torch_private.innermost_transform() is None:
        _close(tape)
    else:
        with torch_private.below_transforms():
            _close(tape)


def _close(tape: Tape) -> None:
    tape.is_open = False
    tape.site.end(tape.structure)
    casts.note(tape)
    made_of = wrappers.version_checks(tape) if tape.wrappers is not None else {}
    tape.storages.clear()
    if tape.candidates:
        _C.decide_candidates(tape)
    casts.replay_from_parameters(tape)
    if tape.opaque_bytes and is_much(tape.opaque_bytes, tape.recompute_bytes + tape.opaque_bytes):
        _warn_of_opaque(tape)
    reads = reads_of(tape) if tape.outer is not None else {}
    tape.saved.clear()
    if tape.roots is not None:
        aliases.record_parameter_versions(tape.roots)
    values = _C.release_unneeded(tape)
    if tape.written_state is not None:
        _copy_written_state(tape, tape.written_state)
    pack_outer_token(tape, values)
    for value in values:
        _hold_or_store(tape, value, reads.get(value))
    if (tape.roots is not None or made_of) and tape.outer is None:
        aliases.watch_roots(tape.roots, made_of)
    tape.roots = None
    tape.outer = None  # breaks references: whoever needs something of this region holds it by now


def is_much(opaque_bytes: int, total_bytes: int) -> bool:
    """Whether a large part of the bytes that the policy recomputes cannot be replayed."""
    return opaque_bytes > max(_OPAQUE_BYTES, total_bytes // _OPAQUE_SHARE)


def _warn_of_opaque(tape: Tape) -> None:
    """Warn once per site that replay saves little there; responsible dispatch modes have been named before."""
    if _MANY_OPAQUE in tape.site.warned or tape.why_opaque:
        return
    tape.site.warned.add(_MANY_OPAQUE)
    total = tape.recompute_bytes + tape.opaque_bytes
    warn_user(_MANY_OPAQUE, opaque=f"{tape.opaque_bytes / 2**20:.1f}", total=f"{total / 2**20:.1f}")


def _note_backward_inside(tape: Tape) -> None:
    """Warn once if a region stays open over whole training steps; one gradient taken inside is normal."""
    task = torch_private.current_graph_task_id()
    if task in tape.tasks_inside:
        return
    tape.tasks_inside.add(task)
    if len(tape.tasks_inside) == _BACKWARDS_INSIDE and _STILL_OPEN not in tape.site.warned:
        tape.site.warned.add(_STILL_OPEN)
        warn_user(_STILL_OPEN, backwards=_BACKWARDS_INSIDE)


def _hold_or_store(tape: Tape, value: Value, reads: Reads | None) -> None:
    latest = _C.latest_alias(value)
    torch_private.keep_object(latest)
    with Paused():
        is_as_recorded = _C.watch(value)
    if not is_as_recorded:
        return
    alias = value.held
    assert alias is not None
    is_to_move = value.action in (Action.OFFLOAD, Action.PREFER_OFFLOAD)
    if is_to_move and (not value.is_input or tape.choice.offloads_inputs_from is not None):
        why = tape.offload(value, alias)
        if value.entry is not None and not why:
            value.entry.action = Action.OFFLOAD
        if value.stored is not None:
            return
    if tape.outer is not None and (tape.hands_kept_out or value.is_input):
        value.stored = pack_outer(tape, value, latest, reads)
        value.held = None
    else:
        value.held = alias


def _copy_written_state(tape: Tape, written: Iterable[Value]) -> None:
    """Copy written state that dropped values are replayed from: the next call overwrites it (Rule 6)."""
    for value in written:
        if value.held is None or value.is_wanted():  # autograd itself rejects later changes of what it saved
            continue
        if value.version in (-1, version_of(value.held)):  # else it changed unrecorded: unpack raises
            tape.copy(value)
