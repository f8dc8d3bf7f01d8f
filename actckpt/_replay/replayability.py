"""What saved values are replayed from, and whether they can be; linear time for thousands of values."""

import weakref
from collections.abc import Sequence

from actckpt._replay.lineage import Value

__all__ = ["Needed", "Obtainable"]


class Needed:
    """Which values the saved ones are replayed from.

    Each value is visited once, in the order of saving. It remembers the first saved value that depends on it. A value
    that no saved value depends on now stays so, since values never get another step. The dependency of the others may
    end, so `has` checks it again, starting from the remembered saved value: most often it is near.
    """

    __slots__ = ("_num_walked", "_saved", "_through")

    def __init__(self, saved: Sequence[weakref.ref[Value]]) -> None:
        self._saved = saved
        self._num_walked = 0
        #: For each value that is replayed from, a saved value that depends on it; saved values map to themselves.
        self._through: weakref.WeakKeyDictionary[Value, weakref.ref[Value]] = weakref.WeakKeyDictionary()

    def has(self, value: Value) -> bool:
        """Whether a saved tensor is on `value`, or is replayed from it."""
        if value.is_wanted():
            return True
        for reference in self._saved[self._num_walked :]:
            self._walk(reference)
        self._num_walked = len(self._saved)
        through = self._through.get(value)
        if through is None:
            return False
        return _leads_to(through(), value) or any(_leads_to(saved(), value) for saved in self._saved)

    def _walk(self, reference: weakref.ref[Value]) -> None:
        root = reference()
        pending = [] if root is None else [root]
        while pending:
            current = pending.pop()
            known = self._through.get(current)
            if known is not None and (known is reference or known() is not None):
                continue
            self._through[current] = reference
            if current.held is None and current.step is not None:
                pending.extend(current.step.inputs)


def _leads_to(saved: Value | None, value: Value) -> bool:
    seen: set[int] = set()
    pending = [] if saved is None else [saved]
    while pending:
        current = pending.pop()
        if current is value:
            return True
        if id(current) in seen or current.ordinal < value.ordinal or current.held is not None or current.step is None:
            continue
        seen.add(id(current))
        pending.extend(current.step.inputs)
    return False


class Obtainable:
    """Which values can still be restored after others were lost."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        #: Values known to be obtainable, with everything that they are made from.
        self._found: weakref.WeakSet[Value] = weakref.WeakSet()

    def lose(self, value: Value) -> None:
        """Record that the bytes of `value` are gone and cannot be made again."""
        if value in self._found:
            self._found.clear()

    def has(self, value: Value) -> bool:
        """Whether the bytes are available, or can be replayed from available bytes."""
        seen: set[Value] = set()
        lasts = True
        pending = [value]
        while pending:
            current = pending.pop()
            if current in seen or current in self._found:
                continue
            seen.add(current)
            if current.held is not None or current.stored is not None:
                continue
            if current.cached is not None:  # only until its backward ends
                lasts = False
            elif current.step is None:
                return False
            else:
                pending.extend(current.step.inputs)
        if lasts:
            self._found.update(seen)
        return True
