"""The sizes that a model is called with, and whose plan each of them runs.

NOTE [ Sizes that share a plan ]

Rule 1. The first sizes have plans of their own. Of those that come later, one that is in no dimension larger than a
        size with a plan runs that: of several such plans the one for the fewest elements. It is taken to need no more
        than that; on a device its peaks are looked at as any others.
Rule 2. A later size that is larger than each of these somewhere has a plan of its own, too, up to so many; so has one
        that gives its blocks more than the size whose plan it ran. What comes then recomputes everything, which is
        told.
Rule 3. Steps of a smaller size tell nothing else of the plan that they run: neither stalls nor times in a race, while
        which they run the plan that was solved. They count as parts of forwards of the size whose plan they run
        (NOTE [ Forwards that are alive ]).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from actckpt._budget.alike_steps import AlikeSteps

__all__ = ["KnownSizes", "Shapes"]

#: So many sizes have plans of their own; and so many with those that are larger than the first.
_OWN_PLANS, _MOST_PLANS = 16, 64


class Shapes(NamedTuple):
    """What the model is called with, as far as a plan depends on it."""

    #: All that is no shape.
    kind: tuple[Any, ...]
    #: A jagged dimension is 1: how much there is of it is a size inside (NOTE [ Sizes inside of a model ]).
    shapes: tuple[tuple[int, ...], ...]

    def holds(self, other: Shapes) -> bool:
        """Return whether the other ones are in no dimension larger."""
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
        self._sizes: dict[Shapes, AlikeSteps] = {}
        #: Smaller ones that no other plan is for.
        self._apart: set[Shapes] = set()

    def __iter__(self) -> Iterator[AlikeSteps]:
        return iter(self._sizes.values())

    def find(self, shapes: Shapes) -> tuple[AlikeSteps | None, float | None]:
        """Return the steps whose plan a forward runs, None where it gets none, and which part of one of these it is.

        That is None where the plan is for this size.
        """
        if (found := self._sizes.get(shapes)) is not None:
            return found, None
        if len(self._sizes) >= _OWN_PLANS and shapes not in self._apart:
            larger = [each for each, steps in self._sizes.items() if steps.has_plan and each.holds(shapes)]
            if larger:
                least = min(larger, key=lambda each: each.num_elements)
                return self._sizes[least], shapes.num_elements / max(least.num_elements, 1)
        if len(self._sizes) < _MOST_PLANS:
            self._sizes[shapes] = self._make()
        return self._sizes.get(shapes), None

    def set_apart(self, shapes: Shapes) -> None:
        """A smaller size is to have a plan of its own."""
        if len(self._sizes) < _MOST_PLANS:
            self._apart.add(shapes)
