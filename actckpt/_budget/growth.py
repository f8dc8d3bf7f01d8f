"""Steps that turn out larger than the arguments of the model show.

NOTE [ Sizes inside of a model ]

Rule 1. A plan is for the shapes that the model is called with. Where sizes are inside (padding that the model takes
        out, tensors in an object of the program), what the first block is given stands for that of a step: the most in
        one forward, where it runs several times.
Rule 2. Where it is given more than the plan was made for, that forward recomputes everything from there on. The next
        plan is for that size, and smaller steps run it as well. Bytes and seconds that were measured are taken to grow
        in proportion.
Rule 3. What grows faster (scores of attention) needs more than that: where the first block is given more than a quarter
        more than when it was measured, the next step is measured as the first one was. That counts if it is larger.
        Sizes that differ from step to step are measured so often at most.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from actckpt._blocks.planned_size import PlannedSize
from actckpt._budget.measuring import MeasuredStep
from actckpt.planner.costs import BlockClass

__all__ = ["Growth"]

_SHARE, _MOST_MEASURED = 1.25, 4


class _Training(Protocol):
    def ran_larger(self, nbytes: int) -> None:
        """The first block was given so many bytes."""


@dataclasses.dataclass
class Growth:
    """What the first block was given when it was measured, and what it is given at most."""

    block: str = ""
    measured_bytes: int = 0
    most_bytes: int = 0
    #: Whether a forward was larger than the plan, ever, and since that was made.
    has_grown: bool = False
    wants_plan: bool = False
    _num_measured: int = 0

    def was_measured(self, block: str, nbytes: int) -> bool:
        """A forward was measured; return whether it was no smaller than those before."""
        self._num_measured += 1
        is_larger = nbytes >= self.measured_bytes
        if is_larger:
            self.block, self.measured_bytes = block, nbytes
            self.most_bytes = max(self.most_bytes, nbytes)
        return is_larger

    def ran(self, nbytes: int) -> None:
        """The first block was given so many bytes, more than the plan was made for."""
        self.most_bytes = max(self.most_bytes, nbytes)
        self.has_grown = self.wants_plan = True

    @property
    def wants_measuring(self) -> bool:
        """Whether the next forward is measured (Rule 3)."""
        is_far = self.most_bytes > _SHARE * self.measured_bytes
        return self.wants_plan and is_far and self._num_measured < _MOST_MEASURED

    @property
    def planned_size(self) -> PlannedSize:
        """What tells where the first block is given more."""
        return PlannedSize(self.most_bytes, _ran_larger)

    @property
    def factor(self) -> float:
        """How much larger the largest step is than the one that was measured."""
        return self.most_bytes / self.measured_bytes if self.measured_bytes else 1.0

    def scaled(self, measured: MeasuredStep) -> MeasuredStep:
        """Return what was measured for the largest step, for the plan that is made now (Rule 2)."""
        self.wants_plan = False
        factor = self.factor
        if factor == 1.0:
            return measured
        classes = {name: _larger(block, factor) for name, block in measured.costs.classes.items()}
        return dataclasses.replace(
            measured,
            costs=dataclasses.replace(measured.costs, classes=classes),
            waiting_bytes=tuple(round(factor * nbytes) for nbytes in measured.waiting_bytes),
        )


def _ran_larger(training: _Training | None, nbytes: int) -> None:
    if training is not None:  # else the block was copied out of its model
        training.ran_larger(nbytes)


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
