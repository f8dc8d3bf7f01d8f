"""The kinds of a model's cycles, and the kind as which a cycle runs.

The first kinds have their own plans. A later cycle whose shapes exceed those of a planned kind in no dimension runs
that kind's plan; of several such kinds, the one with the fewest elements. A cycle that exceeds each of them somewhere
gets its own plan, up to a limit. So does one that needs more than its shapes show: larger tensors inside, more
forwards, or another order of backwards. Beyond the limit everything is recomputed, with a warning.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from actckpt._cycles.kinds import Kind

__all__ = ["CycleKey", "ForwardKey", "Found", "KnownKinds"]

#: Maximum number of kinds with their own plan: the first ones, and including those that are larger than the first.
_OWN_PLANS, _MOST_PLANS = 16, 64


class ForwardKey(NamedTuple):
    """What a forward's part of a plan depends on."""

    #: Device, mode, autocast, trained parameters, and arguments that are no tensors.
    flags: Any
    #: For each tensor argument: its shape, and other properties.
    tensors: tuple[tuple[tuple[int, ...], Any], ...]

    def holds(self, other: ForwardKey) -> bool:
        """Return whether another forward exceeds this one in no dimension, and is otherwise the same."""
        if self.flags != other.flags or len(self.tensors) != len(other.tensors):
            return False
        return all(
            kind == other_kind and len(shape) == len(smaller) and all(map(operator.ge, shape, smaller))
            for (shape, kind), (smaller, other_kind) in zip(self.tensors, other.tensors, strict=True)
        )

    @property
    def num_elements(self) -> int:
        """The total number of elements of all tensors."""
        return sum(math.prod(shape) for shape, _ in self.tensors)


class CycleKey(NamedTuple):
    """Distinguishes kinds of cycles."""

    #: Whether gradients exist at the start.
    accumulates: bool
    #: The first forward.
    forward: ForwardKey


class Found(NamedTuple):
    """The kind as which a cycle runs."""

    #: None: everything is recomputed.
    kind: Kind | None
    #: It is the kind of a larger cycle.
    is_smaller: bool = False


class KnownKinds:
    """Finds the kind of a cycle.

    Args:
        make: returns a new kind.
    """

    def __init__(self, make: Callable[[], Kind]) -> None:
        self._make = make
        self._kinds: dict[CycleKey, Kind] = {}
        #: Smaller ones that need their own plan.
        self._separate: set[CycleKey] = set()

    def forget(self) -> None:
        """Measure all kinds anew: the blocks are others."""
        self._kinds.clear()
        self._separate.clear()

    def find(self, key: CycleKey) -> Found:
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
                return Found(min(larger, key=lambda item: item[0].forward.num_elements)[1], is_smaller=True)
        if not is_full:
            self._kinds[key] = self._make()
        return Found(self._kinds.get(key))

    def separate(self, key: CycleKey) -> None:
        """Give a smaller cycle its own plan."""
        if len(self._kinds) < _MOST_PLANS:
            self._separate.add(key)
