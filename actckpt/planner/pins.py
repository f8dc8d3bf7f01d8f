"""What callers pin: actions that a plan must give to values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from actckpt._text.misspelt import did_you_mean
from actckpt.action import Action
from actckpt.planner.fields import nearest

__all__ = ["Pins", "checked_pins", "names_nothing"]

#: Of one value (block, name), of all of a class ("class", name), or of all with that name.
Pins = Mapping[Any, Action | str]

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


def names_nothing(key: Any, known: Iterable[str]) -> ValueError:
    """Return the error for a pin that names none of the values that a cost table has."""
    names = sorted(set(known))
    near = nearest(str(key[-1] if isinstance(key, tuple) and key else key), names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ValueError(
        f"pins: {key!r} names no value{near}. Pass a name, (class, name) or (block, name); names, as plan.table() "
        f"lists them: {', '.join(map(repr, names[:_MOST_NAMES]))}{more}."
    )
