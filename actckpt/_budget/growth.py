"""Steps that turn out larger than the arguments of the model show.

NOTE [ Sizes inside of a model ]

Rule 1. A plan is for the shapes that the model is called with. Where sizes are inside (padding that the model takes
        out, tensors in an object of the program), what the block is given that runs first stands for that of a step:
        the bytes of each tensor, in its first call. It may be another block in each step (layer dropout).
Rule 2. Where one of these tensors is larger than in the step that was measured, that forward recomputes everything
        from there on: what it needs is not known, and not in proportion (scores of attention). Smaller steps run the
        plan.
Rule 3. The next step that is nearly as large as the largest one is measured as the first one was, and planned for.
        Until it comes steps recompute everything, but so many at most, and so often; and steps are measured so often at
        most. After that, which is told, what is larger than the plan goes on to recompute everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from actckpt._blocks.planned_size import PlannedSize, given_bytes

__all__ = ["Growth"]

_MOST_MEASURED = 16
#: So many forwards in which no block is seen to run are watched; any size is larger than this.
_MOST_UNSEEN, _LESS_THAN_ANY = 16, (-1.0,)
#: From this share of the largest step on one is nearly as large; so many others are waited through, so often.
_NEARLY, _MOST_SMALL, _MOST_WAITS = 0.9, 20, 3

_Sizes = tuple[float, ...]


class _Training(Protocol):
    def ran_larger(self, name: str, given: _Sizes) -> None:
        """A block that runs first was given tensors of so many bytes."""


class Growth:
    """What blocks were given when they were measured, and what the largest step gave them since then."""

    def __init__(self) -> None:
        self._measured: Mapping[str, _Sizes] = {}
        #: Of blocks that ran first in steps that were larger; no step was where there is none.
        self._largest: dict[str, _Sizes] = {}
        #: Whether a forward was larger than the one that was measured, ever.
        self.has_grown = False
        self._num_measured = self._num_small = self._num_waits = self._num_unseen = 0
        self._size: PlannedSize | None = None

    def was_measured(self, given: Mapping[str, _Sizes]) -> None:
        """A forward was measured, the first one or a larger one, in which blocks were given so many bytes."""
        self._num_measured += 1
        self._num_small = 0
        self._measured, self._largest = given, {}

    def was_too_small(self) -> None:
        """A forward that was to be measured was smaller than that."""
        self._num_small += 1

    def ran(self, name: str, given: _Sizes) -> None:
        """A block that runs first was given more than when it was measured."""
        self.has_grown = True
        before = self._largest.get(name, ())
        self._largest[name] = given if len(before) != len(given) else tuple(map(max, before, given))
        if self._num_small >= _MOST_SMALL and self._num_waits < _MOST_WAITS:
            self._num_waits += 1
            self._num_small = 0

    @property
    def wants_measuring(self) -> bool:
        """Whether the next forward is measured, if it is large (Rule 3)."""
        return bool(self._largest) and self._num_measured < _MOST_MEASURED and self._num_small < _MOST_SMALL

    @property
    def has_given_up(self) -> bool:
        """Whether no step that is larger will be measured."""
        is_waiting = self._num_small < _MOST_SMALL or self._num_waits < _MOST_WAITS
        return self._num_measured >= _MOST_MEASURED or not is_waiting

    @property
    def least_bytes(self) -> dict[str, _Sizes]:
        """What blocks that run first must be given in a forward that is measured: one of these tensors."""
        return {
            name: tuple(
                max(_NEARLY * now, then) if now > then else math.inf
                for now, then in zip(given, self._measured[name], strict=False)
            )
            for name, given in self._largest.items()
        }

    def planned_size(self) -> PlannedSize:
        """Return what tells whether a forward is larger than the plan."""
        self._size = PlannedSize(self._measured, given_bytes, _ran_larger, is_for_one=True)
        return self._size

    def was_unseen(self) -> None:
        """A forward was to be measured, and no block ran with gradients, or all were compiled."""
        self._num_unseen += 1

    def smallest_size(self, blocks: Iterable[str]) -> PlannedSize:
        """Return what tells that a block runs after all, of any size."""
        sizes = dict.fromkeys(blocks, _LESS_THAN_ANY) if self._num_unseen < _MOST_UNSEEN else {}
        self._size = PlannedSize(sizes, given_bytes, _ran_larger, is_for_one=True)
        return self._size

    def forward_ended(self) -> None:
        """Look at nothing until the next one: blocks may run outside of their model."""
        if self._size is not None:
            self._size.close()


def _ran_larger(training: _Training | None, name: str, given: _Sizes) -> None:
    if training is not None:  # else the block was copied out of its model
        training.ran_larger(name, given)
