"""The saved-tensor hooks of a region: pack returns a handle for every saved tensor, unpack restores the tensor."""

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from actckpt import _C
from actckpt._C import EngineError, unmoved
from actckpt._core import torch_private
from actckpt._core.sites import warn_user
from actckpt._core.subclasses import FlattenedSubclass
from actckpt._core.tensor_changes import version_of
from actckpt._replay import aliases, audit, casts, wrappers
from actckpt._replay.lineage import Handle, Value, mark_needed, new_leaf_bytes, window_of
from actckpt._replay.outer_hooks import Reads, pack_outer, pack_outer_token, reads_of
from actckpt._replay.paused import Paused
from actckpt._replay.tape import Tape
from actckpt.action import Action
from actckpt.errors import AuditError

__all__ = ["audited", "begin_audit", "close", "is_much", "pack", "pack_other", "unpack", "unpacked_inside"]


#: What pack returns to autograd.
_Packed: TypeAlias = "Handle | _C.OffloadHandle"

#: Warn once if more than one part in this many of the bytes to recompute cannot be replayed ...
_OPAQUE_SHARE = 10
#: ... and they are at least this many.
_OPAQUE_BYTES = 1 << 20
#: Number of backwards inside one open region from which on they are taken for training steps.
_BACKWARDS_INSIDE = 3


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


class Audit(NamedTuple):
    """What a restored tensor is compared with (NOTE [ Audit ])."""

    place: int
    checksum: Tensor
    #: Loads the original from the store; None: it had no room there.
    original: Callable[[], Tensor] | None


def begin_audit(tape: Tape, handle: Handle, place: int, tensor: Tensor) -> None:
    """Record a checksum of a dropped tensor whose place has not passed an audit yet."""
    if not audit.can_compare(tensor):
        return
    value = handle.window.value
    num_compared = None if value.operator is None else value.operator.num_compared
    if num_compared is not None and value.index >= num_compared:
        tape.site.audited.add(place)
        return
    if value.spare is None:
        _leave_checksum(tape, weakref.ref(handle), place, tensor)
    else:  # it may be kept, each time that the place runs
        with Paused():
            begin = functools.partial(_leave_checksum, tape, weakref.ref(handle), place, tensor.detach())
        tape.late_audits.setdefault(value, []).append(begin)


def _leave_checksum(tape: Tape, reference: weakref.ref[Any], place: int, tensor: Tensor) -> None:
    handle = reference()
    if handle is None:
        return
    with Paused(), suppress(torch.OutOfMemoryError):  # an audit must not fail the step: it is skipped here
        handle.audit = Audit(place, audit.checksum(tensor), tape.parked(tensor))
        tape.audited.append(reference)


def audited(handle: Handle, tensor: Tensor) -> Tensor:
    """Return `tensor` if it equals what was saved, else the original; raises if there is none."""
    tape = handle.tape
    expected: Audit = handle.audit
    if torch_private.is_tracing():
        return tensor
    try:
        with Paused():
            is_right = torch.equal(audit.checksum(tensor), expected.checksum)
    except torch.OutOfMemoryError:
        return tensor
    if is_right:
        tape.site.audited.add(expected.place)
        if not tape.audits_always:
            handle.audit = None
        return tensor
    if tape.site.has_other_hooks:  # Rule 3 of NOTE [ Outer hooks ]
        handle.audit = None
        return tensor
    value = handle.window.value
    tape.site.opaque.add(value.key)
    if expected.original is None or tape.repeats:  # Rule 3 of NOTE [ Repeated collectives ]
        raise _failure(handle)
    try:
        with Paused():
            original = expected.original()
    except EngineError as error:
        raise _failure(handle) from error
    audit.warn_of_original(_described(handle))
    return original


def _failure(first: Handle) -> AuditError:
    """Compare all dropped tensors of the region; return the error that lists the wrong ones."""
    tape = first.tape
    failed = [first]
    for reference in tape.audited:
        handle = reference()
        if handle is None or handle is first or handle.audit is None or handle.window.value.held is not None:
            continue
        if handle.window.value.needs_collective:
            continue
        with tape.lock:
            base = _C.bytes_of(tape, handle.window.value)
        with Paused():
            tensor = _C.on(base, handle.window)
            if not torch.equal(audit.checksum(tensor), handle.audit.checksum):
                failed.append(handle)
                tape.site.opaque.add(handle.window.value.key)
    operators = [handle.window.value.step.operator.name for handle in failed if handle.window.value.step is not None]
    return audit.failed_error(list(dict.fromkeys(map(_described, failed))), operators)


def _described(handle: Handle) -> str:
    value = handle.window.value
    made_by = value.operator.name if value.operator is not None else "an unknown operator"
    module = value.module or handle.tape.site.modules.get(value.key)
    where = f" in {module}" if module else ""
    return f"result {value.index} of {made_by}{where}, shape {tuple(handle.window.shape)}, {handle.window.dtype}"


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
        _decide_candidates(tape)
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
    """Whether a large part of what the policy wants recomputed cannot be replayed."""
    return opaque_bytes > max(_OPAQUE_BYTES, total_bytes // _OPAQUE_SHARE)


def _warn_of_opaque(tape: Tape) -> None:
    """Warn once per site that replay saves little there; responsible dispatch modes have been named before."""
    if tape.site.has_warned or tape.why_opaque:
        return
    tape.site.has_warned = True
    total = tape.recompute_bytes + tape.opaque_bytes
    warn_user(
        f"{tape.opaque_bytes / 2**20:.1f} of {total / 2**20:.1f} MiB that the policy of this region wants to recompute "
        "cannot be replayed, since no recorded operator made them; they are kept. actckpt.checkpoint(fn, ...) without "
        "a policy runs the function again instead, and gets through any kernel. r.report() names them.",
    )


def _note_backward_inside(tape: Tape) -> None:
    """Warn once if a region stays open over whole training steps; one gradient taken inside is normal."""
    task = torch_private.current_graph_task_id()
    if task in tape.tasks_inside:
        return
    tape.tasks_inside.add(task)
    if len(tape.tasks_inside) == _BACKWARDS_INSIDE:
        warn_user(
            f"{_BACKWARDS_INSIDE} backwards ran inside of one region, which is still open: what it may need holds its "
            "memory until it closes. End the `with actckpt.region(...)` block before calling backward.",
        )


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


def _decide_candidates(tape: Tape) -> None:
    """Keep a dropped value if recomputing it would hold more bytes; all saved values are known by now."""
    candidates, tape.candidates = tape.candidates, []
    for value in candidates:
        spare, value.spare = value.spare, None
        if spare is None or not value.is_wanted():
            continue
        if value.is_available():
            tape.audit_late(value)
        elif new_leaf_bytes(value, value.nbytes) > value.nbytes:
            value.held = spare
            value.step = None
            tape.holding.append(value)
            if value.entry is not None:
                value.entry.action, value.entry.why = Action.KEEP, "recomputing it would hold more bytes"
        else:
            mark_needed(value)
            tape.audit_late(value)
    tape.late_audits.clear()
