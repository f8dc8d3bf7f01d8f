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

    def seconds(self, plan: Plan, entries: Iterable[int], what: str) -> float:
        """Return the seconds that something (`"recompute_s"`, `"offload_s"`) takes for the value in these entries."""
        values = (value for index in entries for value in plan.costs.blocks[index].values)
        return float(sum(getattr(value, what) for value in values if value.name == self.value.name))


def folded(plan: Plan, entries: Iterable[int]) -> list[list[int]]:
    """Return entries of the stack, those of classes that are called alike together: calls of the same modules."""
    modules: dict[str, set[str]] = {name: set() for name in plan.costs.classes}
    for kind, name in zip(plan.costs.stack, plan.block_names or plan.costs.stack, strict=True):
        modules[kind].add(without_call(name))
    found: dict[frozenset[str], list[int]] = {}
    for index in entries:
        found.setdefault(frozenset(modules[plan.costs.stack[index]]), []).append(index)
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


def _of(plan: Plan, entries: list[int]) -> str:
    modules = () if plan.block_names is None else dict.fromkeys(without_call(plan.block_names[i]) for i in entries)
    if len(modules) in (0, len(entries)):
        return plan.costs.stack[entries[0]]
    return f"{listed(modules)}, {len(entries)} calls"
