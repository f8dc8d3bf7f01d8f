"""What a policy decides, as the recorder asks it."""

import copy
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.utils.checkpoint

from actckpt._text.places import Place, Selector
from actckpt._text.selectors import is_pattern
from actckpt.action import Action, SavedTensorInfo

__all__ = ["Choice", "Table", "is_place"]

#: Torch does not ask policies for these either.
_IGNORED: frozenset[Any] = frozenset(torch.utils.checkpoint.SAC_IGNORED_OPS)


#: Most places of which a table remembers its answer.
_MAX_FOUND = 1 << 20
#: Most places among which the nearest to an entry that matched none is looked for.
_MAX_SEEN = 4096


class Table:
    """Actions by place: an entry that is the text of the place wins, then the last selector that has it.

    Args:
        actions: by the text of a place or of a selector.
        default: for all other places.
    """

    __slots__ = ("_seen", "_selectors", "actions", "default", "found", "matched")

    def __init__(self, actions: dict[str, Action], default: Action) -> None:
        self.actions = actions
        self.default = default
        self._selectors = {text: Selector.parse(text) for text in reversed(actions) if not is_place(text)}
        #: By what stands for a place in csrc/record/module_calls.h.
        self.found: dict[int, Action] = {}
        #: Entries that decided something.
        self.matched: set[str] = set()
        self._seen: dict[str, None] = {}

    def find(self, key: int, module: str, operator: str, occurrence: int, result: int, call: int) -> Action:
        """Return the action at a place, and remember it for the next time."""
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
        """Return whether an entry, and not the default, decides about a place."""
        return str(place) in self.actions or any(selector.has(place) for selector in self._selectors.values())

    def names_operator(self, place: Place, action: Action) -> bool:
        """Return whether the entry that decides about a place names it, or its operator, and says `action`."""
        text = str(place)
        if text in self.actions:
            return self.actions[text] is action
        first = next(((text, found) for text, found in self._selectors.items() if found.has(place)), None)
        return first is not None and self.actions[first[0]] is action and first[1].is_of_operator(place.operator)

    def nearest(self, text: str) -> str:
        """Return the places or modules nearest to an entry, of those that ran."""
        known: Iterable[str] = self._seen
        if "::" not in text:
            known = dict.fromkeys(each.partition("::")[0].partition("@")[0] for each in self._seen)
            if any(each.startswith(f"{text}.") for each in known):
                return f"{text}.**"
        return ", ".join(difflib.get_close_matches(text, list(known), n=2, cutoff=0.4)) or "none"


def is_place(text: str) -> bool:
    """Whether a text is that of one place, not of a selector."""
    try:
        return not is_pattern(text) and bool(Place.parse(text))
    except ValueError:
        return False


class Choice:
    """One policy. Exactly one of the four ways to decide is in use.

    Args:
        actions: by name of an overload of an operator (`Operator.name`); `default` for all others.
        operators: what `actions` or `table` name, for messages; the names of overloads where it is a preset.
        table: by place.
        after_call: asked once for every operator, right after it ran, with the operator, its arguments, its
            keywords and its result.
        for_value: asked once per value, when it is saved for the first time.
        is_per_operator: whether `default` goes by operator too, also where there are no `actions`: inputs stay, and
            values of any size move.
        preset: the one word that stands for `actions`.
        offloads_inputs_from: tensors from before the region that are no parameters, and have so many bytes, are moved;
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
        #: None: by place.
        self.actions: Mapping[str, Action] | None = None if table is not None else actions or {}
        self.operators: tuple[Any, ...] = operators
        self.preset = preset
        self.offloads_inputs_from = offloads_inputs_from
        self.table = table
        #: What was looked up in the table so far, and who is asked for the rest.
        self.found = None if table is None else table.found
        self.find = None if table is None else table.find
        #: Whether it must be known of each value where it was made.
        self.asks_places: bool = table is not None or for_value is not None
        self.default: Action | None = default
        self._is_per_operator = is_per_operator
        self._after_call = after_call
        #: Whether every operator must be reported with `after_call`.
        self.asks_calls: bool = after_call is not None
        self.for_value: Callable[[SavedTensorInfo], Action] | None = for_value

    def offloading_inputs(self, nbytes: int) -> "Choice":
        """Return the same policy, which moves the inputs of the region as well, from so many bytes on."""
        other = copy.copy(self)
        other.offloads_inputs_from = nbytes
        return other

    def of(self, operator: str) -> Action | None:
        """Return the action for what an overload makes, None if that is not known from the overload alone."""
        return self.default if self.actions is None else self.actions.get(operator, self.default)

    def recomputes(self, operator: str) -> bool:
        """Whether what an overload makes may be recomputed in every place but those that a table names."""
        return (self.of(operator) if self.table is None else self.table.default) is Action.RECOMPUTE

    def after_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> Action:
        """Ask for one call of an operator."""
        assert self._after_call is not None
        if func in _IGNORED:
            return Action.RECOMPUTE
        return self._after_call(func, args, kwargs or {}, result)

    @property
    def always(self) -> Action | None:
        """The action for all values, None if they may differ."""
        if self.offloads_inputs_from is not None or self.table is not None or self.actions:
            return None
        if self._is_per_operator and self.default is not Action.KEEP:
            return None
        return self.default
