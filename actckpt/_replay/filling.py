"""Memory from `empty`-like factories that recorded operators fill piece by piece.

NOTE [ Filling ]

What such a factory returns is opaque until recorded operators have written all of its bytes (Rule 4 of NOTE
[ Replay ]); a kernel that nobody records may write the rest. Often the pieces are written one after the other
(`buffer[i] = ...`). So beside the values that the storage really goes through, which are opaque, the same steps make
values that begin with memory of replay's own: a *lineage*. The write that completes the coverage makes a value that
continues the lineage, and can be replayed like any other. What is written at once needs no lineage.

Pieces are stretches of the storage without gaps, or, of a tensor that covers all of it, stretches of one dimension
(`cache[:, :, t]`). An operator that writes to other pieces is replayed too and counts for nothing. One that reads
what it changes must stay within what is covered. Anything else ends the lineage: the memory stays opaque.
"""

from torch import Tensor

from actckpt._replay.coverage import UNINITIALISED, Filling
from actckpt._replay.geometry import covers_all
from actckpt._replay.lineage import Step, Value, blank_of, redirect, window_of
from actckpt._replay.tape import Tape
from actckpt.action import Action

__all__ = ["begin", "continue_lineage", "start_write"]


def begin(tape: Tape, result: object) -> None:
    """Note that an empty factory returned `result`."""
    value = tape.value_of(result) if type(result) is Tensor else None
    if value is not None and value.nbytes and _is_recomputed(value):
        if tape.filling is None:
            tape.filling = {}
        tape.filling[value] = window_of(result, value)  # type: ignore[arg-type]  # no tensor: it would hold the bytes


def _is_recomputed(value: Value) -> bool:
    return value.action is None or value.action is Action.RECOMPUTE


def start_write(tape: Tape, step: Step, written: list[Tensor], why_opaque: str) -> Filling | None:
    """Let a step that is about to write continue the lineage of what it writes to; None: it does or can not."""
    value = tape.value_of(written[0]) if len(written) == 1 else None
    begun = tape.filling.pop(value, None) if value is not None and tape.filling is not None else None
    operator = step.operator
    if begun is None or value is None or why_opaque or operator.reshapes_storage or step.inputs.count(value) != 1:
        return None
    if operator.overwrites and covers_all(written[0], value.nbytes):  # at once: as with any other memory
        return None
    filling = begun if isinstance(begun, Filling) else Filling(begun, blank_of(value, UNINITIALISED))
    filling.piece = filling.piece_of(written[0])
    filling.adds = operator.overwrites
    if not operator.overwrites and not filling.has(filling.piece):
        return None
    redirect(step, value, filling.lineage)
    return filling


def continue_lineage(tape: Tape, step: Step, filling: Filling, tensor: Tensor) -> None:
    """Continue the lineage beside the value that a step made and that is not covered yet."""
    storage = tensor.untyped_storage()
    known = tape.storages.get(id(storage))  # its version is not counted up yet: `value_of` would look at it
    value = known.value if known is not None and known.storage() is storage else None
    if value is None or filling.adds is None or not _is_recomputed(value) or tape.why_never(value):
        return
    lineage = tape.new_value(value.nbytes, value.device)
    lineage.action, lineage.operator = value.action, value.operator
    step.add_output(lineage, (1, 0))
    filling.lineage = lineage
    assert tape.filling is not None  # `start_write` took the lineage from there
    tape.filling[value] = filling
