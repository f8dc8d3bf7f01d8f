"""Entries of a stack that are called alike: those of one class, or of classes whose blocks call the same modules.

A block that runs many times in a forward (weights that layers share, cells of a loop) has classes of its own for its
first and its last calls, and for those that wait for something. They are one row for whoever reads a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from actckpt._text.listed import listed, without_call
from actckpt.action import Action
from actckpt.planner.costs import Value
from actckpt.planner.plans import Plan

__all__ = ["Row", "folded", "listed_entries", "rows", "say_blocks"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A value that entries of the stack have."""

    value: Value
    #: The class, or the modules and how often they are called.
    of: str
    entries: list[int]

    def chosen(self, plan: Plan, action: Action) -> list[int]:
        """Return the entries that do this with the value, and do not run again as a whole."""
        return [i for i in self.entries if not plan.rerun[i] and plan.actions[i][self.value.name] is action]

    def recompute_s(self, plan: Plan, entries: Iterable[int]) -> float:
        """Return the seconds that computing the value again takes in these entries."""
        return sum(value.recompute_s for value in self._values(plan, entries))

    def offload_s(self, plan: Plan, entries: Iterable[int]) -> float:
        """Return the seconds that offloading the value takes in these entries, beside its copies."""
        return sum(value.offload_s for value in self._values(plan, entries))

    def _values(self, plan: Plan, entries: Iterable[int]) -> Iterator[Value]:
        values = (value for i in entries for value in plan.costs.blocks[i].values)
        return (value for value in values if value.name == self.value.name)


def folded(plan: Plan, entries: Iterable[int]) -> list[list[int]]:
    """Return entries of the stack, those that are called alike together."""
    alike = _alike(plan)
    found: dict[object, list[int]] = {}
    for index in entries:
        found.setdefault(alike[plan.costs.stack[index]], []).append(index)
    return list(found.values())


def rows(plan: Plan) -> Iterator[Row]:
    """Yield each value of entries that are called alike: values of one name, size and kind are one."""
    stack, blocks = plan.costs.stack, plan.costs.blocks
    for entries in folded(plan, range(len(stack))):
        found: dict[Value, list[int]] = {}
        for index in entries:
            for value in blocks[index].values:
                kind = dataclasses.replace(value, recompute_s=0.0, offload_s=0.0, inputs=())
                found.setdefault(kind, []).append(index)
        for value, having in found.items():
            yield Row(value, _of(plan, having), having)


def say_blocks(plan: Plan, entries: list[int]) -> str:
    """Say which blocks these are: by name, where the plan knows a model, else how many of which class."""
    if plan.block_names is not None:
        return listed_entries(plan, entries)
    return f"{len(entries)} blocks {plan.costs.stack[entries[0]]!r}"


def listed_entries(plan: Plan, entries: Iterable[int]) -> str:
    """Return entries as text: by name, the calls of a module together, or by number where the plan knows no model."""
    names = plan.block_names
    if names is None:
        return listed(map(str, entries))
    calls: dict[str, list[str]] = {without_call(name): [] for name in names}
    for index in entries:
        calls[without_call(names[index])].append(names[index])
    return listed(itertools.chain(*calls.values()))


def _alike(plan: Plan) -> dict[str, object]:
    """Return by class what it has in common with others: the modules that its entries are calls of, else itself."""
    names = plan.block_names
    if names is None:
        return {name: name for name in plan.costs.classes}
    modules: dict[str, set[str]] = {name: set() for name in plan.costs.classes}
    for kind, name in zip(plan.costs.stack, names, strict=True):
        modules[kind].add(without_call(name))
    return {kind: frozenset(found) for kind, found in modules.items()}


def _of(plan: Plan, entries: list[int]) -> str:
    modules = () if plan.block_names is None else dict.fromkeys(without_call(plan.block_names[i]) for i in entries)
    if len(modules) in (0, len(entries)):
        return plan.costs.stack[entries[0]]
    return f"{listed(modules)}, {len(entries)} calls"
