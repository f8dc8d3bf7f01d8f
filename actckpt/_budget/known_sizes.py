"""The sizes that a model is called with, and whose plan each of them runs.

NOTE [ Sizes that share a plan ]

Rule 1. The first sizes have plans of their own. Of those that come later, one that is in no dimension larger than a
        size with a plan runs that, and needs no more than it: of several such plans the one for the fewest elements.
Rule 2. A later size that is larger than each of these somewhere has a plan of its own, too, up to so many. What comes
        then recomputes everything, which is told.
Rule 3. Steps of a smaller size tell nothing of the plan that they run: neither peaks nor stalls, nor times in a race.
        They count as forwards of the size whose plan they run (NOTE [ Forwards that are alive ]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from actckpt._budget.alike_steps import AlikeSteps

__all__ = ["KnownSizes", "Size"]

#: So many sizes have plans of their own; and so many where they are larger than those that have.
_MAX_SIZES, _MOST_SIZES = 16, 64


class Size(NamedTuple):
    """What the model is called with, as far as a plan depends on it."""

    #: All that is no shape.
    kind: tuple[Any, ...]
    shapes: tuple[torch.Size, ...]

    def holds(self, other: Size) -> bool:
        """Return whether the other one is in no dimension larger."""
        if self.kind != other.kind or [*map(len, self.shapes)] != [*map(len, other.shapes)]:
            return False
        pairs = zip(self.shapes, other.shapes, strict=True)
        return all(more >= less for ours, theirs in pairs for more, less in zip(ours, theirs, strict=True))

    @property
    def num_elements(self) -> int:
        """How many elements all tensors have."""
        return sum(map(math.prod, self.shapes))


class KnownSizes:
    """Finds what was measured of a size, or of a larger one (NOTE [ Sizes that share a plan ]).

    Args:
        make: returns the steps of another size.
    """

    def __init__(self, make: Callable[[], AlikeSteps]) -> None:
        self._make = make
        self._sizes: dict[Size, AlikeSteps] = {}

    def __iter__(self) -> Iterator[AlikeSteps]:
        return iter(self._sizes.values())

    def find(self, size: Size) -> AlikeSteps | None:
        """Return the steps whose plan a forward of a size runs; None: it has none, and gets none."""
        if (found := self._sizes.get(size)) is not None:
            return found
        if len(self._sizes) >= _MAX_SIZES:
            larger = [each for each, steps in self._sizes.items() if steps.plan is not None and each.holds(size)]
            if larger:
                return self._sizes[min(larger, key=lambda each: each.num_elements)]
        if len(self._sizes) < _MOST_SIZES:
            self._sizes[size] = self._make()
        return self._sizes.get(size)

    def is_own(self, size: Size) -> bool:
        """Return whether a size has steps of its own."""
        return size in self._sizes
