"""Values that decide where data goes, or how much of it there is: they stay.

NOTE [ Routing ]

A replay gives the bits of the forward as long as everything that the operator reads has them. Where one bit differs (a
sum formed with atomic operations, a kernel that another library chose anew) the result differs by as much, and so do
gradients. But where a token goes to another expert, they are those of another function, and shapes need not fit.

Rule 1. An integer or a boolean tensor that is an index of `gather`, `scatter`, `index`, `index_put` or the like, that
        names the groups of a grouped product or the classes of a loss, or on which the size of a result depends
        (`nonzero`, `masked_select`, `item`), is never replayed: its bytes are held from then on, as long as something
        needs them. So are those of the integers and masks that it was made of, back to the first tensors of real
        numbers, where they are alive.
Rule 2. Masks that choose among values (`where`, `masked_fill`) and the indices of pooling route nothing. They differ
        where the values do.
Rule 3. Where an entry of a policy has the value's place, operator or name, and says recompute, it is replayed.
"""

from typing import Any

from torch import Tensor

from actckpt._C import WHY_ROUTING
from actckpt._replay.lineage import Value
from actckpt._replay.operators import Operator
from actckpt._replay.tape import Tape
from actckpt.action import Action

__all__ = ["hold_indices"]


def _can_route(tensor: Tensor) -> bool:
    """Whether a tensor holds integers or a mask."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def hold_indices(tape: Tape, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Hold what an operator that is about to run finds its way by."""
    for position, name in operator.routed_by:
        given = args[position] if position < len(args) else (kwargs or {}).get(name)
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(tensor, Tensor):
                _hold(tape, tensor)


def _hold(tape: Tape, tensor: Tensor) -> None:
    """Hold the value of a tensor, and the integers and masks that led to it and are still there (Rule 1)."""
    pending = [tensor]
    while pending:
        tensor = pending.pop()
        value = tape.value_of(tensor)
        if value is None or value.is_input or not _can_route(tensor) or _is_named(tape, value):
            continue
        made_of = value.step.inputs if value.step is not None else ()
        pending += [root for each in made_of if (root := _root(tape, each)) is not None]
        if value.held is None and value.stored is None:
            _keep(tape, value, tensor)


def _keep(tape: Tape, value: Value, tensor: Tensor) -> None:
    """Keep a value of which `tensor` holds the bytes, though it was to be dropped."""
    if value.action is Action.RECOMPUTE and value.was_saved and value.step is not None:
        tape.recompute_bytes -= value.nbytes
    value.action, value.held, value.spare, value.step = Action.KEEP, tensor, None, None
    value.why_opaque = WHY_ROUTING
    tape.holding.append(value)
    tape.leave_out_audit(value)
    if value.entry is not None:
        value.entry.action, value.entry.why = Action.KEEP, WHY_ROUTING


def _root(tape: Tape, value: Value) -> Tensor | None:
    """Return a tensor that still has the bytes of a value."""
    root: Tensor | None = None if value.root is None else value.root()
    return root if root is not None and tape.value_of(root) is value else None


def _is_named(tape: Tape, value: Value) -> bool:
    """Whether an entry of the policy says that this very value is recomputed (Rule 3)."""
    choice = value.choice
    if choice is None or value.operator is None:
        return False
    if choice.table is not None:
        place = tape.place_of(value)
        return place is not None and bool(choice.table.has_entry(place))
    return choice.actions is not None and value.operator.name in choice.actions
