"""A policy's decisions, in the form that the recorder queries."""

import copy
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.utils.checkpoint

from actckpt._text.places import Place, Selector
from actckpt._text.selectors import is_pattern
from actckpt.action import Action, SavedTensorInfo

__all__ = ["Choice", "Table", "is_place"]

#: torch does not query policies for these either.
_IGNORED: frozenset[Any] = frozenset(torch.utils.checkpoint.SAC_IGNORED_OPS)


#: Maximum number of places whose answer a table caches.
_MAX_FOUND = 1 << 20
#: Maximum number of places searched for the nearest match of an entry that matched none.
_MAX_SEEN = 4096


class Table:
    """Actions by place: an entry equal to the place wins, then the last selector that matches.

    Args:
        actions: by the text of a place or of a selector.
        default: for all other places.
    """

    __slots__ = ("_seen", "_selectors", "actions", "default", "found", "matched")

    def __init__(self, actions: dict[str, Action], default: Action) -> None:
        self.actions = actions
        self.default = default
        self._selectors = {text: Selector.parse(text) for text in reversed(actions) if not is_place(text)}
        #: Cached answers, by the place id of csrc/record/module_calls.h.
        self.found: dict[int, Action] = {}
        #: Entries that decided at least one place.
        self.matched: set[str] = set()
        self._seen: dict[str, None] = {}

    def find(self, key: int, module: str, operator: str, occurrence: int, result: int, call: int) -> Action:
        """Return the action at a place, and cache it."""
        place = Place(module, operator, occurrence, result, call)
        text = str(place)
        entries = [text] if text in self.actions else []
        entries += [text for text, selector in self._selectors.items() if selector.has(place)]
        self.matched.update(entries)
        if len(self._seen) < _MAX_SEEN:
            self._seen[text] = None
        if len(self.found) >= _MAX_FOUND:
            self.found.clear()
        action = self.found[key] = self.actions[entries[0]] if entries else self.default
        return action

    def has_entry(self, place: Place) -> bool:
        """Whether an entry, not the default, decides a place."""
        return str(place) in self.actions or any(selector.has(place) for selector in self._selectors.values())

    def names_operator(self, place: Place, action: Action) -> bool:
        """Whether the entry that decides a place says `action` and names that place or its operator."""
        text = str(place)
        if text in self.actions:
            return self.actions[text] is action
        first = next(((text, selector) for text, selector in self._selectors.items() if selector.has(place)), None)
        return first is not None and self.actions[first[0]] is action and first[1].is_of_operator(place.operator)

    def nearest(self, text: str) -> str:
        """Return the places or modules nearest to an entry, of those that ran."""
        known: Iterable[str] = self._seen
        if "::" not in text:
            known = dict.fromkeys(name.partition("::")[0].partition("@")[0] for name in self._seen)
            if any(name.startswith(f"{text}.") for name in known):
                return f"{text}.**"
        return ", ".join(difflib.get_close_matches(text, list(known), n=2, cutoff=0.4)) or "none"


def is_place(text: str) -> bool:
    """Whether a text is that of one place, not of a selector."""
    try:
        return not is_pattern(text) and bool(Place.parse(text))
    except ValueError:
        return False


class Choice:
    """One policy. Exactly one of the four decision forms is in use.

    Args:
        actions: by operator overload name (`Operator.name`); `default` for all others.
        operators: the overload names in `actions` or `table`, for messages, or those of a preset.
        table: by place.
        after_call: called after every operator with the operator, its arguments, its keywords and its result.
        for_value: called once per value, when it is first saved.
        is_per_operator: `default` is per operator too, even without `actions`: inputs stay, and values of any size are
            offloaded.
        preset: the preset's name, if `actions` comes from one.
        offloads_inputs_from: offload non-parameter tensors from before the region that have at least this many bytes;
            None: they stay, or `for_value` decides.
    """

    __slots__ = (
        *("_after_call", "_is_per_operator", "actions", "asks_calls", "asks_places", "default", "find", "for_value"),
        *("found", "offloads_inputs_from", "operators", "preset", "table"),
    )

    def __init__(
        self,
        actions: dict[str, Action] | None = None,
        default: Action | None = None,
        *,
        operators: tuple[Any, ...] = (),
        table: "Table | None" = None,
        after_call: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Action] | None = None,
        for_value: Callable[[SavedTensorInfo], Action] | None = None,
        is_per_operator: bool = False,
        preset: str = "",
        offloads_inputs_from: int | None = None,
    ) -> None:
        #: None: decided by place.
        self.actions: Mapping[str, Action] | None = None if table is not None else actions or {}
        self.operators: tuple[Any, ...] = operators
        self.preset = preset
        self.offloads_inputs_from = offloads_inputs_from
        self.table = table
        #: The table's cache, and the table to query for the rest.
        self.found = None if table is None else table.found
        self.find = None if table is None else table.find
        #: Each value needs a place.
        self.asks_places: bool = table is not None or for_value is not None
        self.default: Action | None = default
        self._is_per_operator = is_per_operator
        self._after_call = after_call
        #: `after_call` is called for every operator.
        self.asks_calls: bool = after_call is not None
        self.for_value: Callable[[SavedTensorInfo], Action] | None = for_value

    def offloading_inputs(self, nbytes: int) -> "Choice":
        """Return the same policy, which also offloads region inputs of at least `nbytes`."""
        other = copy.copy(self)
        other.offloads_inputs_from = nbytes
        return other

    def of(self, operator: str) -> Action | None:
        """Return the action for an overload's results, None if the overload alone does not determine it."""
        return self.default if self.actions is None else self.actions.get(operator, self.default)

    def recomputes(self, operator: str) -> bool:
        """Whether an overload's results may be recomputed in places that a table does not name."""
        return (self.of(operator) if self.table is None else self.table.default) is Action.RECOMPUTE

    def after_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> Action:
        """Query the policy for one operator call."""
        assert self._after_call is not None
        if func in _IGNORED:
            return Action.RECOMPUTE
        return self._after_call(func, args, kwargs or {}, result)

    @property
    def always(self) -> Action | None:
        """The action for all values, None if actions may differ."""
        if self.offloads_inputs_from is not None or self.table is not None or self.actions:
            return None
        if self._is_per_operator and self.default is not Action.KEEP:
            return None
        return self.default
