"""Replay of collectives that a policy names.

NOTE [ Repeated collectives ]

All ranks of a group must run a collective, and in the same order. So whether, how often and after which others replay
repeats one must not depend on local facts: free memory, the replay window, tensor sizes.

Rule 1. Only results of functional collectives (`_c10d_functional`) can be replayed. A policy entry must name the
operator or the exact place, and say recompute. Defaults, entries for a whole module, and policy functions do not count.
All other collectives are kept. All ranks must use the same policy, as with torch's checkpoint; nothing compares them.
Rule 2. Before a saved tensor is restored, the collectives that it depends on run in forward order, each with its wait
(csrc/replay/repeated_collectives.cpp). Their results stay until the backward ends or nothing depends on them; neither a
window nor memory pressure releases them. So each runs at most once per backward, and which ones run depends only on the
graph and the order of unpacking. Where that order cannot be kept, replay raises: outside of a backward, and once
another backward of the same region, in another thread, has ended.
Rule 3. No local fact may change what a rank keeps. A value made from a repeated result is recomputed even if that holds
more bytes than keeping it. A failed audit raises, now and in all later steps, instead of keeping values on one rank
only. Blocks planned for a budget open no region with such a policy, and profiling raises.
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
    """Whether the policy names the current collective and says recompute (Rule 1)."""
    choice = tape.choice
    if choice.table is None:
        return choice.actions is not None and choice.actions.get(operator.name) is Action.RECOMPUTE
    if tape.calls is None:
        return False
    module, call, occurrence = _C.running_call(tape.calls)
    return bool(choice.table.names_operator(Place(module, operator.name, occurrence, 0, call), Action.RECOMPUTE))


def note(tape: Any, operator: Operator, result: Any) -> None:
    """Mark the tensor, or list of tensors, that a repeatable collective returned."""
    results = result if isinstance(result, (list, tuple)) else [result]
    values = [value for value in map(tape.value_of, results) if value is not None and value.step is not None]
    if tape.site.opaque and (values or is_named(tape, operator)):
        raise _kept_here_error(tape.site.where)
    if values and ranks.is_local():
        raise _planned_error(operator)
    for value in values:
        value.is_repeated = value.needs_collective = tape.repeats = True


def order_error(value: Value) -> ActckptError:
    """Return the error for a collective that other ranks need not run now (Rule 2)."""
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
