"""Whether a model that runs a plan is given more than the plan was made for."""

from __future__ import annotations

from typing import Any

from actckpt._blocks.arguments import bytes_of, first_tensor
from actckpt._core.sites import warn_user
from actckpt._text.sizes import format_bytes
from actckpt.planner.costs import BLOCK_INPUT
from actckpt.planner.plans import Plan

__all__ = ["PlannedSize"]


class PlannedSize:
    """What the first block of a plan was given when it was measured. A plan knows one size, and no other is planned."""

    def __init__(self, plan: Plan) -> None:
        assert plan.blocks is not None
        self.block = next(name for name in plan.blocks if name is not None)
        calls = [block.values for block, name in zip(plan.costs.blocks, plan.blocks, strict=True) if name == self.block]
        held = [next((value.nbytes for value in call if value.name == BLOCK_INPUT), 0.0) for call in calls]
        #: Bytes of its hidden states, in the call that is given most; 0 where one held none, which says nothing.
        self.nbytes = max(held) if all(held) else 0.0
        self._budget_bytes = plan.budget_bytes
        self._is_told = self.nbytes == 0

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn, once, where the block is given more."""
        if self._is_told:
            return
        nbytes = bytes_of(first_tensor((args, kwargs)))
        if nbytes <= self.nbytes:
            return
        self._is_told = True
        warn_user(
            f"apply: block {self.block!r} is given {format_bytes(nbytes)} of hidden states, and the plan was made for "
            f"{format_bytes(self.nbytes)}: memory may be above its budget of {format_bytes(self._budget_bytes)}. Make "
            "the plan with the largest batch, or use actckpt.apply(model, budget=...), which makes a plan for each "
            "size. Told once."
        )
