"""Collectives that replay repeats, since a policy names them.

NOTE [ Repeated collectives ]

A collective runs on all ranks of its group, or they wait for ever. So whether one is repeated in backward, how often,
and after which others must not depend on what only one rank knows: how much memory is free, what a window has room for,
how long its tensors are.

Rule 1. What functional collectives return (`_c10d_functional`: all_gather_into_tensor, reduce_scatter_tensor,
        all_reduce, those of several tensors, all_to_all_single, broadcast) is kept, unless an entry of the policy names
        the operator, or the very place, and says recompute. No default names one, nor does an entry for a whole module,
        or a function; a name that `actckpt.name` gives comes after the collective ran, and raises (NOTE [ Names ]). The
        forms that write to what they are given, and all other collectives, stay.
Rule 2. Before a saved tensor is brought back, the collectives that lead to it, and that this backward has not repeated,
        run in the order of the forward, each with its wait (csrc/replay/repeated_collectives.cpp). What they return
        stays until the backward ends, or nothing leads to it any more: no window, no call for room releases it. So each
        runs once in a backward at most, and which of them run depends on the graph and the order of unpacking alone.
Rule 3. What may be made from such a value is recomputed where the policy says so, also where that holds more bytes than
        to keep it: how many bytes is something that each rank knows for itself.
Rule 4. Outside of a backward none is repeated: reading a saved tensor there raises.
Rule 5. A region compares which of its collectives it repeats with the other ranks of the group (`agreement`), where
        that is not what a region repeated last at this place: its site, and the module that ran the first collective.
        So who repeats less than before compares too; who repeats none, and never did, does not. Ranks that differ
        raise: a collective would be taken for another one. A rank that changes alone finds nobody, and raises when the
        timeout of the group is over; what the others repeat meanwhile fails, and says who waits.
        It compares when it reads the first saved tensor, whatever becomes of that one: at the same point on all ranks.
        The sequence is which collectives of the region these are, and their operators. A region elsewhere may repeat
        the like: so ranks must not differ both in how much the group had run before the first in the forward,
        and in the module that ran it. Shapes need no comparison, as these collectives ran in the forward.
Rule 6. An audit that fails on one rank would have that rank keep what others recompute. So it raises there,
        now and in later steps, until all ranks name the operator in `configure(opaque=...)`; also where what
        came back wrong is what the collective returned.
Rule 7. A block that a budget plans opens no region with such a policy: what the plan of one rank keeps after
        that region says which of them lead to something in backward. Profiling (NOTE [ Alone ]) raises.
"""

from collections.abc import Callable
from typing import Any

from actckpt import _C
from actckpt._core import agreement, torch_private
from actckpt._replay.lineage import Value
from actckpt._replay.operators import Operator
from actckpt._text.places import Place
from actckpt.action import Action
from actckpt.errors import ActckptError, AuditError, BlocksError, RanksDifferError

__all__ = ["Collectives", "agree", "explained", "is_named", "named_error", "note", "out_of_turn_error", "outside_error"]


class Collectives:
    """Those of one tape."""

    __slots__ = ("_began", "_num_run", "_sequences", "is_named")

    def __init__(self) -> None:
        #: By group, as the operator was given it: how many ran, and which of them replay may repeat.
        self._num_run: dict[Any, int] = {}
        self._sequences: dict[Any, list[agreement.Collective]] = {}
        #: Which module ran the first of them, and how many operations the group had run then.
        self._began: dict[Any, tuple[str | None, int | None]] = {}
        #: Whether the policy names one.
        self.is_named = False

    def note(self, group: Any, operator: Operator, module: Callable[[], str | None], *, is_repeated: bool) -> None:
        """Count one that ran in a module."""
        number = self._num_run.get(group, 0)
        self._num_run[group] = number + 1
        if not number:
            self._sequences[group] = []
            self._began[group] = module(), torch_private.num_operations(agreement.resolved(group))
        if is_repeated:
            self._sequences[group].append((number, operator.name))

    def groups(self) -> list[tuple[Any, Any]]:
        """Return the groups, in an order that all ranks have, each with what operators are given for it."""
        groups = [(agreement.resolved(given), given) for given in self._sequences]
        return sorted(groups, key=lambda each: str(each[0].group_name))  # two may have ranks in common

    def agree(self, site: Any) -> None:
        """Compare with the other ranks what is new at a site (Rule 5)."""
        for group, given in self.groups():
            repeated = agreement.Repeated(site.where, *self._began[given], tuple(self._sequences[given]))
            agreement.agree(group, repeated)


def is_named(tape: Any, operator: Operator) -> bool:
    """Whether the policy names the collective that runs now, and says that its result is recomputed (Rule 1)."""
    choice = tape.choice
    if choice.table is None:
        return choice.actions is not None and choice.actions.get(operator.name) is Action.RECOMPUTE
    if tape.calls is None:
        return False
    module, call, occurrence = _C.running_call(tape.calls)
    return bool(choice.table.names_operator(Place(module, operator.name, occurrence, 0, call), Action.RECOMPUTE))


def note(tape: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Take down a collective that ran, and the tensor or the list of them that it returned."""
    if tape.collectives is None:
        tape.collectives = Collectives()
    position = operator.group_position
    group = args[position] if position < len(args) else kwargs["group_name"]
    results = result if isinstance(result, (list, tuple)) else [result]
    values = [value for value in map(tape.value_of, results) if value is not None]
    repeated = [value for value in values if value.step is not None]
    if repeated and agreement.is_alone():
        raise _planned_error(operator)
    for value in repeated:
        value.is_repeated = value.needs_collective = tape.repeats = True
    tape.must_agree = not agreement.is_alone()
    ours = tape.collectives
    if repeated or (tape.site.opaque and is_named(tape, operator)):  # it stays here, and here only: Rule 6
        ours.is_named = True
    first = values[0] if values else None
    ours.note(group, operator, lambda: first and tape.site.module(first.key), is_repeated=bool(repeated))


def agree(tape: Any) -> None:
    """Make sure that all ranks run the same collectives again before this one does."""
    if tape.site.opaque and tape.collectives.is_named:
        raise AuditError(
            f"A saved tensor of {tape.site.where} came back from replay with other bytes than it had in an earlier "
            "step, so this rank would keep it and repeat other collectives than the others. Name the operator that "
            "made it, on all ranks, with actckpt.configure(opaque=[...]), and start again."
        )
    tape.collectives.agree(tape.site)


def explained(tape: Any, error: BaseException) -> BaseException:
    """Return what to raise where a collective failed that runs again: who waits for what else, if anybody does."""
    if not isinstance(error, Exception):
        return error
    for group, _ in tape.collectives.groups():
        if others := agreement.waiting(group):
            found = RanksDifferError(
                f"A collective of the group {group.group_name!r} that the backward of {tape.site.where} repeats "
                f"failed: {error}\nOther ranks do not run it, since they changed what they repeat: {others}.\nGive the "
                "same policy to all ranks, at the same step."
            )
            found.__cause__ = error
            return found
    return error


def outside_error(value: Value) -> ActckptError:
    """Say that a saved tensor cannot be read outside of a backward (Rule 4)."""
    return ActckptError(
        f"A saved tensor is read outside of a backward, and is made from what {_named(value)} returned, which the "
        "policy recomputes: the collective would have to run, on all ranks. Read it inside of a backward, or keep what "
        "the collective returns: leave it out of the policy."
    )


def out_of_turn_error(value: Value) -> ActckptError:
    """Say that a collective would run where other ranks need not (Rule 2)."""
    return ActckptError(
        f"Replay needs what {_named(value)} returned, which is gone: another backward of the same region, in another "
        "thread, had repeated it and has ended. Run one backward at a time, or keep what the collective returns: leave "
        "it out of the policy."
    )


def named_error(value: Value, name: str) -> ValueError:
    """Say that a name does not have a collective repeated (Rule 1)."""
    base = value.operator.func._schema.name.partition("::")[2]
    entry = f"Add {{'::{base}': 'recompute'}} to the policy, or take" if value.operator.is_repeatable else "Take"
    return ValueError(
        f"actckpt.name: the policy recomputes what is named {name!r}, and {_named(value)} returned it. No name has a "
        "collective run again, only an entry for its operator, on all ranks: it has run when what it returned gets a "
        f"name. {entry} the name out of the policy."
    )


def _planned_error(operator: Operator) -> BlocksError:
    return BlocksError(
        f"A block that a budget plans opens a region whose policy has {operator.name} run again in backward. Each rank "
        "makes a plan of its own, and what that keeps says which collectives are needed: ranks would repeat other "
        "ones. Apply a policy in the place of the budget, or leave the collective out of the policy of that region."
    )


def _named(value: Value) -> str:
    return str(value.operator.name)
