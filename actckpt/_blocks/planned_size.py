"""Whether a model that runs a plan is given more than the plan was made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actckpt._blocks.arguments import bytes_of, first_tensor
from actckpt._core.sites import warn_user
from actckpt._text.sizes import format_bytes
from actckpt.planner.costs import BLOCK_INPUT
from actckpt.planner.plans import Plan

__all__ = ["PlannedSize", "warns_of_larger"]


class PlannedSize:
    """What a block is given under a plan.

    Args:
        nbytes: of hidden states.
        exceeded: is told, once, how many bytes they are where they are more, with the training whose block it is.
    """

    def __init__(self, nbytes: float, exceeded: Callable[[Any, int], None]) -> None:
        self._nbytes, self._exceeded = nbytes, exceeded
        self._is_told = False

    def check(self, training: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare it with what the block is given now."""
        if self._is_told:
            return
        nbytes = bytes_of(first_tensor((args, kwargs)))
        if nbytes > self._nbytes:
            self._is_told = True
            self._exceeded(training, nbytes)


class _Warning:
    """Says that a plan, which knows one size, runs a larger one, and no other is planned."""

    def __init__(self, block: str, nbytes: float, plan: Plan) -> None:
        self._block, self._nbytes, self._budget_bytes = block, nbytes, plan.budget_bytes

    def __call__(self, _: Any, nbytes: int) -> None:
        warn_user(
            f"apply: block {self._block!r} is given {format_bytes(nbytes)} of hidden states, and the plan was made for "
            f"{format_bytes(self._nbytes)}: memory may be above its budget of {format_bytes(self._budget_bytes)}. Make "
            "the plan with the largest batch, or use actckpt.apply(model, budget=...), which makes a plan for each "
            "size. Told once."
        )


def warns_of_larger(plan: Plan) -> tuple[str, PlannedSize] | None:
    """Return the block of a plan that shows its size, and what warns where it is given more.

    It is the first one that held its hidden states in each call: what is given to a model, the program holds.
    """
    assert plan.blocks is not None
    held: dict[str, list[float]] = {}
    for block, name in zip(plan.costs.blocks, plan.blocks, strict=True):
        if name is not None:
            given = (value.nbytes for value in block.values if value.name == BLOCK_INPUT)
            held.setdefault(name, []).append(next(given, 0.0))
    found = next(((name, max(sizes)) for name, sizes in held.items() if all(sizes)), None)
    return None if found is None else (found[0], PlannedSize(found[1], _Warning(*found, plan)))
