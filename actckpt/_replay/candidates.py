"""Dropped values that may be kept after all, where recomputing them would hold more bytes than keeping them.

NOTE [ Least held ]

Recomputing a dropped value holds what it is replayed from: its *leaves*, unless they are held anyway. A value whose
leaves have at most its bytes is dropped at once. Any other is a *candidate*: its bytes stay for now. One leaf may serve
many candidates, each smaller than it, so they are decided together: kept are those candidates that, with the leaves of
all others, have the fewest bytes. That is a minimal cut of the graph between the candidates and their leaves
(csrc/graph/least_held.h). To keep all candidates and no leaf is one such cut, and is what plain autograd holds.

A candidate that the cut drops is dropped at once: later candidates only add to what its leaves are held for. One that
the cut keeps waits while the program has its leaves, or other values that are made from them, and may yet save these.
It is kept as soon as that releases one of its leaves, as plain autograd would have done, or when the region closes.

An input is held for no sum of small values: the program may change it before backward.
"""

from typing import Any

from actckpt import _C
from actckpt._replay.lineage import Value, mark_needed
from actckpt.action import Action

__all__ = ["decide"]


def decide(tape: Any, is_last: bool) -> None:
    """Drop or keep candidates; unless it is the last decision, some may wait."""
    waiting = _waiting(tape)
    keeps = _C.kept_of(waiting)
    dropped = [value for value, stays in zip(waiting, keeps, strict=True) if not stays]
    kept = [value for value, stays in zip(waiting, keeps, strict=True) if stays]
    for value in kept:
        value.held = value.spare
    for value in dropped:
        value.spare = None
        value.is_needed = False  # it may have been, as a candidate
        mark_needed(value)
        tape.audit_late(value)
    for value in kept:
        value.held = None
    decided = [True] * len(kept) if is_last else _C.frees_leaves(tape, kept)
    for value, is_decided in zip(kept, decided, strict=True):
        if is_decided:
            _keep(tape, value)
        else:
            tape.candidates.append(value)
    if is_last:
        tape.late_audits.clear()


def _waiting(tape: Any) -> list[Value]:
    """Take the candidates that are needed and whose bytes are nowhere else."""
    waiting = []
    candidates, tape.candidates = tape.candidates, []
    for value in candidates:
        if value.spare is None or not (value.is_wanted() or value.is_needed):
            value.spare = None
        elif value.is_available():
            value.spare = None
            tape.audit_late(value)
        else:
            waiting.append(value)
    return waiting


def _keep(tape: Any, value: Value) -> None:
    value.held, value.spare = value.spare, None
    value.step = None
    tape.holding.append(value)
    tape.late_audits.pop(value, None)
    if value.entry is not None:
        value.entry.action, value.entry.why = Action.KEEP, "recomputing it would hold more bytes"
