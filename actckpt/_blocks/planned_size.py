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
    """What a block of a plan was given when it was measured. A plan knows one size, and no other is planned."""

    def __init__(self, plan: Plan) -> None:
        assert plan.blocks is not None
        held: dict[str, list[float]] = {}
        for block, name in zip(plan.costs.blocks, plan.blocks, strict=True):
            if name is not None:
                given = (value.nbytes for value in block.values if value.name == BLOCK_INPUT)
                held.setdefault(name, []).append(next(given, 0.0))
        #: The first block that held its hidden states in each call, and the bytes of those in the call that is given
        #: most; 0 where there is none. What is given to a model, the program holds.
        self.block, self.nbytes = next(
            ((name, max(found)) for name, found in held.items() if all(found)), (next(iter(held)), 0.0)
        )
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
