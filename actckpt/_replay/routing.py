"""Values that route data, or determine how much of it there is, are kept.

Replay reproduces the forward's bits if everything that the operator reads has the same bits. If one bit differs (atomic
additions, another kernel choice), a result usually differs by as little. But if a token goes to another expert, the
result belongs to another function, and shapes may not fit.

- A routing tensor is never replayed; its bytes are held while something needs them.
- Routing tensors are integers or booleans of three kinds: indices of `gather`, `scatter`, `index`, `index_put` and the
  like; the groups of a grouped product and the classes of a loss; and what determines the size of a result (`nonzero`,
  `masked_select`, `item`).
- Live integers and masks that they were made from are held too, back to the first floating-point tensors.
- Masks that select values (`where`, `masked_fill`) and pooling indices do not route.
- If a policy entry names the value's place or operator and says recompute, it is replayed.
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
    """Whether a tensor holds integers or booleans."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def hold_indices(tape: Tape, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Hold the routing tensors of an operator that is about to run."""
    for position, name in operator.routed_by:
        argument = args[position] if position < len(args) else (kwargs or {}).get(name)
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(tensor, Tensor):
                _hold(tape, tensor)


def _hold(tape: Tape, tensor: Tensor) -> None:
    """Hold the value of a tensor, and the live integers and masks that it was made from."""
    pending = [tensor]
    while pending:
        tensor = pending.pop()
        value = tape.value_of(tensor)
        if value is None or value.is_input or not _can_route(tensor) or _is_named(tape, value):
            continue
        made_of = value.step.inputs if value.step is not None else ()
        pending += [root for source in made_of if (root := _root(tape, source)) is not None]
        if value.held is None and value.stored is None:
            _keep(tape, value, tensor)


def _keep(tape: Tape, value: Value, tensor: Tensor) -> None:
    """Keep a value that was to be dropped; `tensor` holds its bytes."""
    if value.action is Action.RECOMPUTE and value.was_saved and value.step is not None:
        tape.recompute_bytes -= value.nbytes
    value.action, value.held, value.candidate_tensor, value.step = Action.KEEP, tensor, None, None
    value.why_opaque = WHY_ROUTING
    tape.holding.append(value)
    tape.leave_out_audit(value)
    if value.entry is not None:
        value.entry.action, value.entry.why = Action.KEEP, WHY_ROUTING


def _root(tape: Tape, value: Value) -> Tensor | None:
    """Return a live tensor that has the bytes of a value."""
    root: Tensor | None = None if value.root is None else value.root()
    return root if root is not None and tape.value_of(root) is value else None


def _is_named(tape: Tape, value: Value) -> bool:
    """Whether a policy entry says that this value is recomputed."""
    choice = value.choice
    if choice is None or value.operator is None:
        return False
    if choice.table is not None:
        place = tape.place_of(value)
        return place is not None and bool(choice.table.has_entry(place))
    return choice.actions is not None and value.operator.name in choice.actions
