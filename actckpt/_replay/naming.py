"""Names of values, which programs give with `actckpt.name`, and what they change.

NOTE [ Names ]

Rule 1. A name is one of the value that a tensor stands for: of all tensors on its storage, as long as nothing is
        written there. Parts of a tensor subclass get its name.
Rule 2. What becomes of a value is decided when autograd first saves it, or by its place when it is made; an operator
        that saves its own result (`exp`) does so before the program can give that a name. So a name that a policy goes
        by decides again. What was dropped is kept or moved then: its bytes are there.
Rule 3. What stays by its place can be dropped by a name as long as nothing has saved it: under such tables it has a
        step until the region closes (`names_drop`). What was saved before stays, and the report says so.
Rule 4. What a collective returned is never dropped by a name; where a policy says so, it raises
        (Rule 2 of NOTE [ Repeated collectives ]).
Rule 5. The policy is the one of the region in which the value was born, as for all that it decides.
"""

from typing import Any

from torch import Tensor

from actckpt._core import torch_private
from actckpt._core.subclasses import parts_of
from actckpt._replay import collectives
from actckpt._replay.lineage import Value
from actckpt._replay.tape import Tape
from actckpt.action import Action

__all__ = ["close", "let_stay", "note"]

_TOO_LATE = "its name says recompute, and it had been saved before it got that name"


def note(tape: Tape, tensor: Any, name: str) -> None:
    """Give the value that `tensor` stands for a name, and let the policy decide again where it goes by names."""
    if not isinstance(tensor, Tensor) or torch_private.innermost_transform() is not None:
        return
    if hasattr(type(tensor), "__tensor_flatten__"):
        for part in parts_of(tensor)[0].values():
            note(tape, part, name)
        return
    value = tape.value_of(tensor)
    if value is None or name in (value.names or ()):
        return
    value.names = (*(value.names or ()), name)
    if value.entry is not None:
        value.entry.names = value.names
    _check_origin(tape, value, name)
    action = _decided_again(tape, value, tensor)
    if action is Action.RECOMPUTE:
        _drop(tape, value)
    elif action is not None:
        let_stay(tape, value, tensor, action)


def close(tape: Tape) -> None:
    """Release what what stays was made from: nobody drops it any more."""
    for value in tape.holding:
        if value.held is not None and value.action is not Action.RECOMPUTE:
            value.step = None


def _check_origin(tape: Tape, value: Value, name: str) -> None:
    """Raise where a policy recomputes by its name what a collective returned (Rule 4)."""
    table = None if value.choice is None else value.choice.table
    if table is None or value.step is not None or value.operator is None or not value.operator.is_collective:
        return
    if table.find_named(tape.place_of(value), value.names or ()) is Action.RECOMPUTE:
        raise collectives.named_error(value, name)


def _decided_again(tape: Tape, value: Value, tensor: Tensor) -> Action | None:
    """Return what the policy says of a value now that it has one more name, None if that is what it said before."""
    choice = value.choice
    action: Action | None = None
    if choice is None or value.is_parameter:
        return None
    if choice.table is not None:
        action = choice.table.find_named(tape.place_of(value), value.names)
    elif choice.for_value is not None and value.was_saved:  # else it is asked when it is saved
        action = choice.for_value(tape.info_of(value, tensor))
    if action is Action.PREFER_OFFLOAD and value.was_saved and value.action is not Action.RECOMPUTE:
        return None  # moved by now, or somebody would have waited for it
    return None if action is value.action else action


def let_stay(tape: Tape, value: Value, tensor: Tensor, action: Action, why: str = "") -> None:
    """Keep or move a value of which `tensor` holds the bytes, though it was to be dropped."""
    if not value.was_saved:
        value.action = action
        if value.held is None:
            value.held = tensor
            tape.holding.append(value)
        return
    if value.action is Action.RECOMPUTE and value.step is not None:
        tape.recompute_bytes -= value.nbytes
    value.action = action
    value.spare = value.stored = None
    tape.late_audits.pop(value, None)
    done, why_not_moved = tape.hold(value, tensor, action)
    if value.entry is not None:
        value.entry.action, value.entry.why = done, why or why_not_moved


def _drop(tape: Tape, value: Value) -> None:
    if value.was_saved or value.step is None or tape.num_lost:
        if value.entry is not None and not value.entry.why:
            value.entry.why = _TOO_LATE
        return
    value.action = Action.RECOMPUTE
    value.held = None
    tape.__dict__.pop("needed", None)  # what it is made from leads to saved values again
