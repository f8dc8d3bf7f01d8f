"""What may become of each value, and what callers pin of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actckpt._text.suggestions import did_you_mean
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, CostTable

__all__ = ["Allowed", "Pins", "allowed_actions", "checked_pins"]

#: Of one value (block, name), of all of a class ("class", name), or of all with that name.
Pins = Mapping[Any, Action | str]
#: Of an entry of the stack, the actions that each value may have, by name.
Allowed = dict[str, tuple[Action, ...]]

_PLANNED = {action.value: action for action in (Action.KEEP, Action.RECOMPUTE, Action.OFFLOAD)}
_MOST_NAMES = 6


def checked_pins(pins: Any) -> dict[Any, Action]:
    """Return pins with their actions; None has none.

    Raises:
        ValueError: they are no dict, or an action is none that a plan may have.
    """
    if pins is not None and not isinstance(pins, Mapping):
        raise ValueError(
            f"pins={pins!r} is a {type(pins).__name__}, not a dict. Pass actions by names of values, which "
            "plan.table() lists: pins={'x0': 'keep'}."
        )
    return {key: _action(action, key) for key, action in (pins or {}).items()}


def _action(action: Any, key: Any) -> Action:
    text = action.value if isinstance(action, Action) else action
    if not isinstance(text, str) or text not in _PLANNED:
        near = did_you_mean([str(text).lower()], list(_PLANNED), show=repr)
        raise ValueError(f"pins: {key!r} is {text!r}. Pass one of {', '.join(_PLANNED)}.{near}")
    return _PLANNED[text]


def allowed_actions(costs: CostTable, pins: Mapping[Any, Action]) -> tuple[Allowed, ...]:
    """Return the actions that each value may have, per entry of the stack: one where it is pinned.

    Raises:
        ValueError: a pin names nothing, cannot be, or contradicts another.
    """
    # Values can leave where something else runs between forward and backward.
    leaving = frozenset(entry for moment in costs.moments if not moment.is_backward for entry in moment.handed)
    free: list[Allowed] = []
    for index, block in enumerate(costs.blocks):
        free.append({})
        for value in block.values:
            can_go = costs.d2h_bytes_per_s > 0 and value.offloadable and index in leaving
            can_be_dropped = not value.needed or value.replayable or (block.rerun and value.name != BLOCK_INPUT)
            may = (Action.KEEP, *[Action.RECOMPUTE] * can_be_dropped, *[Action.OFFLOAD] * can_go)
            free[-1][value.name] = may
    pinned: dict[tuple[int, str], tuple[Action, Any]] = {}
    for key, action in pins.items():
        for index, name in _named(costs, key):
            may = free[index][name]
            other, other_key = pinned.get((index, name), (action, key))
            if other is not action and action in may:
                raise ValueError(
                    f"pins: {other_key!r} says {other.value!r} and {key!r} says {action.value!r}, both for block "
                    f"{index}. Leave out one."
                )
            if action in may:
                pinned[index, name] = action, other_key
            elif action is not Action.OFFLOAD or index in leaving or (isinstance(key, tuple) and _is_number(key[0])):
                can, why = ", ".join(each.value for each in may), _why_not(costs, action, leaves=index in leaving)
                raise ValueError(f"pins: {key!r} cannot be {action.value!r} in block {index}, {why}: it can be {can}.")
    for (index, name), (action, _) in pinned.items():
        free[index][name] = (action,)
    return tuple(free)


def _why_not(costs: CostTable, action: Action, *, leaves: bool) -> str:
    if action is Action.RECOMPUTE:
        return "since nothing computes it again"
    if not leaves:
        return "since the last block before a backward offloads nothing"
    return "since it may not be offloaded" if costs.d2h_bytes_per_s else "since there is no link to host memory"


def _is_number(where: object) -> bool:
    return isinstance(where, int) and not isinstance(where, bool)


def _named(costs: CostTable, key: Any) -> list[tuple[int, str]]:
    """Return the entries and values that a pin names."""
    found = list(_matches(costs, key))
    if found:
        return found
    names = sorted({value.name for block in costs.classes.values() for value in block.values})
    near = did_you_mean([str(key[-1] if isinstance(key, tuple) and key else key)], names, show=repr)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    raise ValueError(
        f"pins: {key!r} names no value. Pass a name, (class, name) or (block, name); names, as plan.table() lists "
        f"them: {', '.join(map(repr, names[:_MOST_NAMES]))}{more}.{near}"
    )


def _matches(costs: CostTable, key: Any) -> Iterator[tuple[int, str]]:
    where, name = key if isinstance(key, tuple) and len(key) == 2 else (None, key)
    for index, class_name in enumerate(costs.stack):
        if where is None or where == class_name or (_is_number(where) and where == index):
            yield from ((index, value.name) for value in costs.blocks[index].values if value.name == name)
