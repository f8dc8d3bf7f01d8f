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
    """Actions by place and by name: an entry that is the text of the place wins, then the last selector that has it.

    Args:
        actions: by the text of a place or of a selector.
        default: for all other places.
        only_names: the texts are names, and no selectors.
    """

    __slots__ = ("_seen", "_selectors", "actions", "default", "found", "matched", "names_drop")

    def __init__(self, actions: dict[str, Action], default: Action, *, only_names: bool = False) -> None:
        self.actions = actions
        self.default = default
        parse = Selector.of_name if only_names else Selector.parse
        self._selectors = {text: parse(text) for text in reversed(actions) if only_names or not is_place(text)}
        stays = {action is not Action.RECOMPUTE for action in (*actions.values(), default)}
        #: Whether a name may say that a value is dropped that stays as far as its place tells.
        self.names_drop = len(stays) > 1 and any(
            selector.is_name and actions[text] is Action.RECOMPUTE for text, selector in self._selectors.items()
        )
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

    def find_named(self, place: Place | None, names: tuple[str, ...]) -> Action | None:
        """Return the action for a value that has names, None where its place decides, or no entry has any of them."""
        if len(self._seen) < _MAX_SEEN:
            self._seen.update(dict.fromkeys(names))
        named = {text for text, selector in self._selectors.items() if selector.has_name(names, place)}
        self.matched |= named
        if not named or (place is not None and str(place) in self.actions):
            return None
        for text, selector in self._selectors.items():
            if place is not None and selector.has(place):
                return None
            if text in named:
                return self.actions[text]
        return None

    def names(self, place: Place | None, names: tuple[str, ...]) -> bool:
        """Return whether an entry, and not the default, decides about a value."""
        if place is not None and str(place) in self.actions:
            return True
        selectors = self._selectors.values()
        return any((place is not None and s.has(place)) or s.has_name(names, place) for s in selectors)

    def names_operator(self, place: Place, action: Action) -> bool:
        """Return whether the entry that decides about a place names it, or its operator, and says `action`."""
        text = str(place)
        if text in self.actions:
            return self.actions[text] is action
        first = next(((text, found) for text, found in self._selectors.items() if found.has(place)), None)
        return first is not None and self.actions[first[0]] is action and first[1].is_of_operator(place.operator)

    def nearest(self, text: str) -> str:
        """Return what is nearest to an entry, of what ran or was given: places, or modules and names, as it is one."""
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
        *("found", "names_drop", "offloads_inputs_from", "operators", "preset", "table"),
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
        #: Whether a name may say that what stays is dropped after all.
        self.names_drop: bool = table is not None and table.names_drop
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
