"""Audits: checksums of dropped tensors, compared with what replay brings back.

NOTE [ Audit ]

Kernels that the dispatcher does not see can write memory that the recorder does not see. Replay then makes other bytes
than the forward had. So the first time that a place runs, the tensor that is saved there leaves a checksum, which its
device computes and the forward does not read. Unpack compares.

On a mismatch the original is used, with a warning, if the store had room for it and no meter counted the step on the
device. Otherwise one error lists every tensor of the region that came back wrong. In both cases these places are opaque
from then on: their values are kept.

A *structure* is a hash of the operators, shapes and dtypes that a call site has run so far. A *place* is a structure
and the number of tensors that were saved in it. Elements are compared, not storages: memory between elements that
nothing wrote does not count. A candidate (csrc/record/candidates.h) leaves its checksum when it is dropped or
overwritten.
"""

import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt import _C
from actckpt._C import OffloadError
from actckpt._core import devices, torch_private
from actckpt._core.checksums import Result, checksum
from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText
from actckpt._replay.lineage import Handle
from actckpt._replay.paused import Paused
from actckpt._replay.tape import Tape
from actckpt.errors import AuditError

__all__ = ["audited", "begin_audit", "can_compare", "checksum"]

_ORIGINAL_USED = WarningText(
    "{tensor} came back from replay with other bytes than it had: something wrote to memory that no operator declares. "
    "The original was used, and it is kept from now on.",
    "Name the operator or the module in actckpt.configure(opaque=[...]).",
    per="value of the program",
)


class Audit(NamedTuple):
    """What a restored tensor is compared with (NOTE [ Audit ])."""

    place: int
    checksum: Result
    #: Loads the original from the store; None: it had no room there.
    original: Callable[[], Tensor] | None


def begin_audit(tape: Tape, handle: Handle, place: int, tensor: Tensor) -> None:
    """Record a checksum of a dropped tensor whose place has not passed an audit yet."""
    if not can_compare(tensor):
        return
    value = handle.window.value
    num_compared = None if value.operator is None else value.operator.num_compared
    if num_compared is not None and value.index >= num_compared:
        tape.site.audited.add(place)
        return
    if value.candidate_tensor is None:
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
        handle.audit = Audit(place, Result(checksum(tensor)), tape.store_original(tensor))
        tape.audited.append(reference)


def audited(handle: Handle, tensor: Tensor) -> Tensor:
    """Return `tensor` if it equals what was saved, else the original; raises if there is none."""
    tape = handle.tape
    expected: Audit = handle.audit
    if torch_private.is_tracing():
        return tensor
    try:
        with Paused():
            is_right = torch.equal(checksum(tensor).cpu(), expected.checksum.read())
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
    except OffloadError as error:
        raise _failure(handle) from error
    _warn_of_original(_described(handle))
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
            if not torch.equal(checksum(tensor).cpu(), handle.audit.checksum.read()):
                failed.append(handle)
                tape.site.opaque.add(handle.window.value.key)
    operators = [handle.window.value.step.operator.name for handle in failed if handle.window.value.step is not None]
    return _failed_error(list(dict.fromkeys(map(_described, failed))), operators)


def _described(handle: Handle) -> str:
    value = handle.window.value
    made_by = value.operator.name if value.operator is not None else "an unknown operator"
    module = value.module or handle.tape.site.modules.get(value.key)
    where = f" in {module}" if module else ""
    return f"result {value.index} of {made_by}{where}, shape {tuple(handle.window.shape)}, {handle.window.dtype}"


def can_compare(tensor: Tensor) -> bool:
    """Whether a checksum of a tensor would say anything."""
    if devices.is_capturing() or torch_private.is_tracing():
        return False
    has_bytes = not (tensor.is_meta or type(tensor) is torch_private.fake_tensor_type)
    return has_bytes and not torch_private.is_zero_tangent(tensor)


def _warn_of_original(what: str) -> None:
    """Say once that a tensor came back wrong and its original was used."""
    warn_user(_ORIGINAL_USED, tensor=what)


def _failed_error(failures: list[str], operators: list[str]) -> AuditError:
    """Return the error that lists the tensors of one region that came back wrong."""
    lines = "\n  ".join(failures)
    return AuditError(
        f"{len(failures)} saved tensors came back from replay with other bytes than they had:\n  {lines}\nSomething "
        "wrote to memory that no operator said it writes (a kernel called behind torch's back, or a write through "
        "`.data`), so this backward has no right gradient. From now on they are kept: run the step again. To say so "
        f"from the start: actckpt.configure(opaque={sorted(set(operators))!r})."
    )
