"""The kinds of cycles of a model, and which of them a cycle is run as.

NOTE [ Kinds that share a plan ]

1. The first kinds have plans of their own. A later cycle whose shapes are in no dimension larger than those of a kind
   with a plan runs that plan: of several such kinds, the one with the fewest elements.
2. A cycle that is larger than each of these somewhere has a plan of its own, up to a limit. So has one that needs more
   than its shapes show: larger tensors inside, more forwards, or another order of backwards.
3. Then everything is recomputed, with a warning.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from actckpt._cycles.kinds import Kind

__all__ = ["CycleKey", "ForwardKey", "Found", "KnownKinds"]

#: So many kinds have plans of their own; and so many with those that are larger than the first.
_OWN_PLANS, _MOST_PLANS = 16, 64


class ForwardKey(NamedTuple):
    """What a forward's share of a plan depends on."""

    #: Device, mode, autocast, what is trained, and arguments that are no tensors.
    flags: Any
    #: Of each tensor among the arguments: its shape, and whatever else.
    tensors: tuple[tuple[tuple[int, ...], Any], ...]

    def holds(self, other: ForwardKey) -> bool:
        """Return whether another forward is in no dimension larger, and else the same."""
        if self.flags != other.flags or len(self.tensors) != len(other.tensors):
            return False
        return all(
            kind == other_kind and len(shape) == len(smaller) and all(map(operator.ge, shape, smaller))
            for (shape, kind), (smaller, other_kind) in zip(self.tensors, other.tensors, strict=True)
        )

    @property
    def num_elements(self) -> int:
        """Of all tensors."""
        return sum(math.prod(shape) for shape, _ in self.tensors)


class CycleKey(NamedTuple):
    """What tells kinds of cycles apart."""

    #: Whether gradients exist at the begin.
    accumulates: bool
    #: The first forward.
    forward: ForwardKey


class Found(NamedTuple):
    """What a cycle is run as."""

    #: None: everything is recomputed.
    kind: Kind | None
    #: Whether it is the kind of a larger cycle.
    is_smaller: bool = False


class KnownKinds:
    """Finds the kind of a cycle (NOTE [ Kinds that share a plan ]).

    Args:
        make: returns a new kind.
    """

    def __init__(self, make: Callable[[], Kind]) -> None:
        self._make = make
        self._kinds: dict[CycleKey, Kind] = {}
        #: Smaller ones that need a plan of their own.
        self._separate: set[CycleKey] = set()

    def all(self) -> list[Kind]:
        """Return all kinds with plans of their own."""
        return [*self._kinds.values()]

    def find(self, key: CycleKey) -> Found:
        """Return what a cycle is run as."""
        if (known := self._kinds.get(key)) is not None:
            return Found(known)
        is_full = len(self._kinds) >= _MOST_PLANS
        if is_full or (len(self._kinds) >= _OWN_PLANS and key not in self._separate):
            larger = [
                (other, kind)
                for other, kind in self._kinds.items()
                if kind.can_be_shared and other.accumulates == key.accumulates and other.forward.holds(key.forward)
            ]
            if larger:
                return Found(min(larger, key=lambda each: each[0].forward.num_elements)[1], is_smaller=True)
        if not is_full:
            self._kinds[key] = self._make()
        return Found(self._kinds.get(key))

    def separate(self, key: CycleKey) -> None:
        """A smaller cycle needs a plan of its own."""
        if len(self._kinds) < _MOST_PLANS:
            self._separate.add(key)
