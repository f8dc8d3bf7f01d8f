"""Collectives that replay repeats, since a policy names them.

NOTE [ Repeated collectives ]

A collective runs on all ranks of its group. So whether replay repeats one, how often, and after which others must not
depend on what one rank knows alone: its free memory, the room in its window, how long its tensors are.

Rule 1. All ranks of a group have the same policy, around the same parts of the model, as with torch's checkpoint.
        Nothing compares them.
Rule 2. What functional collectives return (`_c10d_functional`: all_gather_into_tensor, reduce_scatter_tensor,
        all_reduce, those of several tensors, all_to_all_single, broadcast) is kept, unless an entry of the policy names
        the operator, or the very place, and says recompute. No default names one, nor does an entry for a whole module,
        or a function. The forms that write to what they are given, and all other collectives, are kept.
Rule 3. Before a saved tensor is brought back, the collectives that lead to it, and that this backward has not repeated,
        run in the order of the forward, each with its wait (csrc/replay/repeated_collectives.cpp). What they return
        stays until the backward ends, or nothing leads to it any more: no window, no call for room releases it. So each
        runs once in a backward at most, and which of them run depends on the graph and the order of unpacking alone.
        Where that order cannot be kept, it raises: outside of a backward, and once another backward of the same
        region, in another thread, has ended.
Rule 4. What is made from such a value is recomputed where the policy says so, also where that holds more bytes than
        to keep it: how many bytes is something that each rank knows for itself.
Rule 5. An audit that fails on one rank would have that rank keep what others recompute. So it raises, and so do all
        later steps of the process. `configure(opaque=...)` lists the operator from the start.
Rule 6. A block that a budget plans opens no region with such a policy: what the plan of one rank keeps after
        that region says which of them lead to something in backward. Profiling (NOTE [ Fake collectives ]) raises.
"""

from typing import Any

from actckpt import _C
from actckpt._core import ranks
from actckpt._replay.lineage import Value
from actckpt._replay.operators import Operator
from actckpt._text.places import Place
from actckpt.action import Action
from actckpt.errors import ActckptError, AuditError, BlocksError

__all__ = ["is_named", "note", "order_error"]


def is_named(tape: Any, operator: Operator) -> bool:
    """Whether the policy names the collective that runs now, and says that its result is recomputed (Rule 2)."""
    choice = tape.choice
    if choice.table is None:
        return choice.actions is not None and choice.actions.get(operator.name) is Action.RECOMPUTE
    if tape.calls is None:
        return False
    module, call, occurrence = _C.running_call(tape.calls)
    return bool(choice.table.names_operator(Place(module, operator.name, occurrence, 0, call), Action.RECOMPUTE))


def note(tape: Any, operator: Operator, result: Any) -> None:
    """Mark what a collective that ran has returned, a tensor or a list of them, where replay repeats it."""
    results = result if isinstance(result, (list, tuple)) else [result]
    values = [value for value in map(tape.value_of, results) if value is not None and value.step is not None]
    if tape.site.opaque and (values or is_named(tape, operator)):
        raise _kept_here_error(tape.site.where)
    if values and ranks.is_local():
        raise _planned_error(operator)
    for value in values:
        value.is_repeated = value.needs_collective = tape.repeats = True


def order_error(value: Value) -> ActckptError:
    """Say that a collective would run where other ranks need not run it (Rule 3)."""
    return ActckptError(
        f"A saved tensor is made from what {_named(value)} returned, which the policy recomputes. It is read outside "
        "of a backward, or while two backwards of its region run in two threads, where other ranks need not run the "
        "collective. Read it inside of one backward, or keep what the collective returns: leave it out of the policy."
    )


def _kept_here_error(where: str) -> AuditError:
    return AuditError(
        f"A saved tensor of {where} came back from replay with other bytes than it had in an earlier step. This rank "
        "would keep it, and repeat other collectives than the others. Name the operator that made it, on all ranks, "
        "with actckpt.configure(opaque=[...]), and start again."
    )


def _planned_error(operator: Operator) -> BlocksError:
    return BlocksError(
        f"A block that a budget plans opens a region whose policy has {operator.name} run again in backward. Each rank "
        "makes a plan of its own, and what that keeps says which collectives are needed: ranks would repeat other "
        "ones. Apply a policy in the place of the budget, or leave the collective out of the policy of that region."
    )


def _named(value: Value) -> str:
    return str(value.operator.name)
