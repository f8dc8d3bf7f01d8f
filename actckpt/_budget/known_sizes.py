"""The sizes that a model is called with, and whose plan each of them runs.

NOTE [ Sizes that share a plan ]

Rule 1. The first sizes have plans of their own. Of those that come later, one that is in no dimension larger than a
        size with a plan runs that: of several such plans the one for the fewest elements. It is taken to need no more
        than that; on a device its peaks are looked at as any others.
Rule 2. A later size that is larger than each of these somewhere has a plan of its own, too, up to so many; so has one
        that gives its blocks more than the size whose plan it ran, and one that is alive together with others, from
        where it first is. What comes then recomputes everything, which is told, or counts as one of the size whose
        plan it runs where several are alive.
Rule 3. Steps of a smaller size tell nothing else of the plan that they run: neither stalls nor times in a race, while
        which they run the plan that was solved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from actckpt._budget.alike_steps import AlikeSteps
from actckpt._budget.shapes import Shapes

__all__ = ["Found", "KnownSizes"]

#: So many sizes have plans of their own; and so many with those that are larger than the first.
_OWN_PLANS, _MOST_PLANS = 16, 64


class Found(NamedTuple):
    """Whose plan a forward runs."""

    #: None: it has none, and gets none.
    steps: AlikeSteps | None
    #: Whether it is of a smaller size than these.
    is_smaller: bool = False
    #: What is alive then; None: one of the size of the steps.
    shapes: Shapes | None = None


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

    def find(self, shapes: Shapes, *, is_alone: bool) -> Found:
        """Return whose plan a forward runs.

        Args:
            is_alone: no other forward is alive.
        """
        if (found := self._sizes.get(shapes)) is not None:
            return Found(found)
        is_full = len(self._sizes) >= _MOST_PLANS
        if is_full or (len(self._sizes) >= _OWN_PLANS and is_alone and shapes not in self._apart):
            larger = [each for each, steps in self._sizes.items() if steps.has_plan and each.holds(shapes)]
            if larger:
                steps = self._sizes[min(larger, key=lambda each: each.num_elements)]
                return Found(steps, is_smaller=True, shapes=None if is_full else shapes)
        if not is_full:
            self._sizes[shapes] = self._make()
        return Found(self._sizes.get(shapes))

    def set_apart(self, shapes: Shapes) -> None:
        """A smaller size is to have a plan of its own."""
        if len(self._sizes) < _MOST_PLANS:
            self._apart.add(shapes)
