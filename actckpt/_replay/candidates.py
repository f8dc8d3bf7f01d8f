"""Dropped values that may be kept after all, where recomputing them would hold more bytes than keeping them.

NOTE [ Least held ]

Recomputing a dropped value holds what it is replayed from: its *leaves*, unless they are held anyway. A value whose
leaves have at most its bytes is dropped at once. Any other is a *candidate*: its bytes stay for now. One leaf may serve
many candidates, each smaller than it, so they are decided together: kept are those candidates that, with the leaves of
all others, have the fewest bytes. That is a minimal cut of the graph between the candidates and their leaves
(csrc/graph/least_held.h). To keep all candidates and no leaf is one such cut, and is what plain autograd holds: so
the least is never more than plain autograd holds.

Candidates are decided when the region closes. They are also decided each time that their bytes have doubled since the
last decision, or a region over a whole model would hold them and their leaves together until it closes. Such an early
decision drops candidates, or keeps one because a dropped one is replayed from it; all others wait.
"""

import enum
from typing import Any

from torch import Tensor

from actckpt import _C
from actckpt._replay.lineage import Value, mark_needed
from actckpt.action import Action

__all__ = ["Verdict", "add", "decide"]

#: The early decisions of a region begin at so many bytes of candidates.
_FIRST_DECISION_BYTES = 1 << 12


class Verdict(enum.IntEnum):
    """What becomes of a candidate."""

    RECOMPUTE = 0
    KEEP = 1
    #: One that is recomputed reads it.
    KEEP_FOR_OTHERS = 2


def add(tape: Any, value: Value, tensor: Tensor) -> None:
    """Let a dropped value wait for the decision whether it is kept."""
    value.spare = tensor
    tape.candidates.append(value)
    tape.candidate_bytes += value.nbytes
    if tape.candidate_bytes >= tape.decides_at_bytes:
        decide(tape, is_last=False)
        tape.decides_at_bytes = max(2 * tape.candidate_bytes, _FIRST_DECISION_BYTES)


def decide(tape: Any, *, is_last: bool) -> None:
    """Decide which candidates are kept and which are dropped; unless it is the last decision, some may wait."""
    waiting = _waiting(tape)
    verdicts = _C.verdicts(waiting)
    tape.candidates = []
    tape.candidate_bytes = 0
    for value, verdict in zip(waiting, verdicts, strict=True):
        if verdict == Verdict.KEEP_FOR_OTHERS or (is_last and verdict == Verdict.KEEP):
            _keep(tape, value)
        elif verdict == Verdict.KEEP:
            tape.candidates.append(value)
            tape.candidate_bytes += value.nbytes
    for value, verdict in zip(waiting, verdicts, strict=True):
        if verdict == Verdict.RECOMPUTE:
            value.spare = None
            mark_needed(value)
            tape.audit_late(value)
    if is_last:
        tape.late_audits.clear()


def _waiting(tape: Any) -> list[Value]:
    """Return the candidates that a saved tensor is on and whose bytes are nowhere else."""
    waiting = []
    for value in tape.candidates:
        if value.spare is None or not value.is_wanted():
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
