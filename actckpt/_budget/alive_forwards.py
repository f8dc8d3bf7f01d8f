"""Which forwards of a model are alive at once.

NOTE [ Forwards that are alive ]

Rule 1. A forward is alive from where it begins to where a backward has released its graph, or the program has dropped
        that. Those of all sizes that may have plans count (`training` remembers so many).
Rule 2. Which were alive at once with one of a size is remembered: of all of that size the largest number, of several
        sizes the most that they need at least, and the most that they need in plain training.
Rule 3. Where a size was not measured yet, its forwards are taken to need what the others do until it was.
Rule 4. Gradients of parameters are there, as far as they count, from the backward of the first of them on: all of them
        are taken to be there all the time, once. Where one backward reads several forwards (of a sum of losses), they
        wait in the engine until those of the last one have come, so that they count as activations, and beside
        gradients that are there already. What is added to a sum that waits makes another sum.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from actckpt import _C
from actckpt._budget.shapes import Shapes
from actckpt._budget.shares import Bounds, Part
from actckpt._budget.unread import UnreadForwards
from actckpt._core import torch_private

__all__ = ["AliveForwards"]

#: Of so many of them that were alive at once, and of which some were not measured, is remembered.
_MOST_UNKNOWN = 64


class Size(Protocol):
    """Of forwards that are alike."""

    @property
    def bounds(self) -> Bounds | None:
        """What each of them needs; None: that was not measured yet."""


class AliveForwards:
    """Counts the forwards of a model (NOTE [ Forwards that are alive ])."""

    def __init__(self) -> None:
        self._now: Counter[Size | Shapes] = Counter()
        self._num_alike: Counter[Size] = Counter()
        #: By size, with forwards of others.
        self._mixed: dict[Size, Part] = {}
        #: Those of which some were not measured.
        self._unknown: list[Counter[Size]] = []
        #: What was known before the forward began that began last.
        self._before: tuple[Counter[Size], dict[Size, Part], list[Counter[Size]]] | None = None
        self.unread = UnreadForwards()
        #: Of a device, when none was alive.
        self.held_bytes: int | None = None
        #: Whether one began while autocast had casts of another one in its cache.
        self.find_casts = False
        #: Whether one backward read several forwards, and the last one that read any.
        self._are_read_together, self._last_backward = False, -1

    @property
    def num(self) -> int:
        """How many are alive now."""
        return self._now.total()

    def num_of(self, size: Size) -> int:
        """Return how many of a size are alive now."""
        return self._now[size]

    def smaller(self) -> list[Shapes]:
        """Return the shapes of those that are alive and run plans of larger sizes."""
        return [each for each in +self._now if isinstance(each, Shapes)]

    def begin(self, size: Size | Shapes) -> None:
        """A forward begins; shapes: it runs the plan of a larger size, alone."""
        self._before = self._num_alike.copy(), dict(self._mixed), list(self._unknown)
        self._now[size] += 1
        if isinstance(size, Shapes):
            return
        self._num_alike[size] = max(self._num_alike[size], self._now[size])
        planned = Counter({each: num for each, num in self._now.items() if num and not isinstance(each, Shapes)})
        if len(planned) > 1:
            self._note(planned)

    def refused(self) -> None:
        """The forward that began last does not run: its plan does not fit."""
        if self._before is not None:
            self._num_alike, self._mixed, self._unknown = self._before

    def gone(self, size: Size | Shapes) -> None:
        """A forward has gone: it failed, or nobody can run backward through it any more."""
        self._now[size] -= 1

    def part(self, size: Size) -> Part:
        """Return what a forward of a size is of the most that were alive with one."""
        unknown, self._unknown = self._unknown, []
        for each in unknown:
            self._note(each)
        num = max(self._num_alike[size], *(each.total() for each in self._unknown if size in each), 1)
        found = self._mixed.get(size, Part.of_alike(num))
        whole, num = found.all.most(found.own.times(num)), max(found.num, num)
        return Part(found.own, whole, num, self._are_read_together)

    def part_of_others(self) -> Part:
        """Return what a forward is of any that are alive together."""
        return dataclasses.replace(Part.of_alike(2), are_read_together=self._are_read_together)

    def _note(self, seen: Counter[Size]) -> None:
        found = [(each, each.bounds, num) for each, num in seen.items()]
        known = [(each, bounds, num) for each, bounds, num in found if bounds is not None]
        if len(known) < len(found):
            if seen not in self._unknown and len(self._unknown) < _MOST_UNKNOWN:
                self._unknown.append(seen)
            return
        least, plain = (sum(num * getattr(bounds, name) for _, bounds, num in known) for name in ("least", "plain"))
        for each, own, _ in known:
            before = self._mixed.get(each, Part(own, own, 1))
            self._mixed[each] = Part(own, before.all.most(Bounds(least, plain)), max(before.num, seen.total()))

    def follow(
        self,
        size: Size | Shapes,
        outputs: list[Tensor],
        begins: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        """A forward has ended: see what becomes of it.

        Args:
            outputs: what it returned that has a graph.
            begins: called where a backward comes to one of the outputs for the first time.
            ended: called where that backward has ended.
        """
        is_first = iter((True,))

        def reached(_: Tensor) -> None:
            if next(is_first, False):
                task = torch_private.current_graph_task_id()
                self._are_read_together = self._are_read_together or task == self._last_backward
                self._last_backward = task
                begins()
                _C.when_backward_ends(first_ended)
            if not torch_private.keeps_graph():
                _C.when_backward_ends(released)

        def first_ended() -> None:
            self.unread.backward_ended()
            dropped_unread.detach()
            ended()

        def dropped() -> None:
            self.gone(size)

        def released() -> None:
            if after.detach() is not None:
                self.gone(size)

        # It lives as long as the graph: where that goes without a last backward, so does the forward.
        after, dropped_unread = _after(reached, dropped), _after(reached, self.unread.forward_dropped)
        for output in outputs:  # backward may not come to all of them
            output.register_hook(reached)


def _after(something: object, call: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Call once that something is gone, but not at the end of the process."""
    found = weakref.finalize(something, call)
    found.atexit = False
    return found
