"""Steps that turn out larger than the arguments of the model show.

NOTE [ Sizes inside of a model ]

Rule 1. A plan is for the shapes that the model is called with. Where sizes are inside (padding that the model takes
        out, tensors in an object of the program), what the block is given that runs first stands for that of a step:
        the bytes of all tensors, in its first call. It may be another one in each step (layer dropout).
Rule 2. Where it is given more than the plan was made for, that forward recomputes everything from there on. The next
        plan is for that size, and smaller steps run it as well. Bytes and seconds that were measured are taken to grow
        in proportion.
Rule 3. What grows faster (scores of attention) needs more than that: where a step is larger by more than a quarter than
        the one that was measured, the next step that is nearly as large is measured as the first one was. Until then
        steps recompute everything, but so many at most; and steps are measured so often at most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from actckpt._blocks.planned_size import PlannedSize, given_bytes
from actckpt._budget.measuring import MeasuredStep
from actckpt.planner.costs import BlockClass

__all__ = ["Growth"]

_SHARE, _MOST_MEASURED = 1.25, 16
#: From this share of the largest step on one is nearly as large; so many others are waited through.
_NEARLY, _MOST_SMALL = 0.9, 20


class _Training(Protocol):
    def ran_larger(self, name: str, nbytes: int) -> None:
        """A block that runs first was given so many bytes."""


class Growth:
    """What blocks were given when they were measured, and how much more it is at most."""

    def __init__(self) -> None:
        self._measured: Mapping[str, int] = {}
        #: Of the largest step, the block that ran first, and what it was given.
        self._largest = "", 0
        #: How much larger that is than the one that was measured.
        self.factor = 1.0
        #: Whether a forward was larger than the plan, ever, and since that was made.
        self.has_grown = self.wants_plan = False
        self._num_measured = self._num_small = 0
        self._size: PlannedSize | None = None

    def was_measured(self, given: Mapping[str, int]) -> None:
        """A forward was measured, the first one or a larger one, in which blocks were given so many bytes."""
        self._num_measured += 1
        self._num_small = 0
        self._measured = given
        name, nbytes = self._largest
        self.factor = max(nbytes / given[name], 1.0) if given.get(name) else 1.0

    def was_too_small(self) -> None:
        """A forward that was to be measured was smaller than that."""
        self._num_small += 1

    @property
    def least_bytes(self) -> dict[str, float]:
        """What blocks that run first must be given in a forward that is measured."""
        return {name: _NEARLY * self.factor * nbytes for name, nbytes in self._measured.items()}

    def ran(self, name: str, nbytes: int) -> None:
        """A block that runs first was given so many bytes, more than the plan was made for."""
        self._largest, self.factor = (name, nbytes), nbytes / self._measured[name]
        self.has_grown = self.wants_plan = True

    @property
    def wants_measuring(self) -> bool:
        """Whether the next forward is measured (Rule 3)."""
        is_far = self.factor > _SHARE
        return is_far and self._num_measured < _MOST_MEASURED and self._num_small < _MOST_SMALL

    def planned_size(self) -> PlannedSize:
        """Return what tells whether a forward is larger than the plan."""
        most = {name: self.factor * nbytes for name, nbytes in self._measured.items() if nbytes}
        self._size = PlannedSize(most, given_bytes, _ran_larger, is_for_one=True)
        return self._size

    def forward_ended(self) -> None:
        """Look at nothing until the next one: blocks may run outside of their model."""
        if self._size is not None:
            self._size.close()

    def scaled(self, measured: MeasuredStep) -> MeasuredStep:
        """Return what was measured for the largest step, for the plan that is made now (Rule 2)."""
        self.wants_plan = False
        if self.factor == 1.0:
            return measured
        classes = {name: _larger(block, self.factor) for name, block in measured.costs.classes.items()}
        return dataclasses.replace(
            measured,
            costs=dataclasses.replace(measured.costs, classes=classes),
            waiting_bytes=tuple(round(self.factor * nbytes) for nbytes in measured.waiting_bytes),
        )


def _ran_larger(training: _Training | None, name: str, nbytes: int) -> None:
    if training is not None:  # else the block was copied out of its model
        training.ran_larger(name, nbytes)


def _larger(block: BlockClass, factor: float) -> BlockClass:
    values = tuple(
        dataclasses.replace(value, nbytes=factor * value.nbytes, recompute_s=factor * value.recompute_s)
        for value in block.values
    )
    return dataclasses.replace(
        block,
        forward_s=factor * block.forward_s,
        backward_s=factor * block.backward_s,
        working_set_bytes=factor * block.working_set_bytes,
        values=values,
        rerun_s=None if block.rerun_s is None else factor * block.rerun_s,
        recompute_bytes=factor * block.recompute_bytes,
        rerun_bytes=factor * block.rerun_bytes,
    )
