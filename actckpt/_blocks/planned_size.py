"""Whether a model gets larger inputs than its plan was made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from actckpt._blocks.arguments import bytes_of, first_tensor
from actckpt._core.sites import warn_user
from actckpt._core.storages import tensors_in
from actckpt._core.warning_texts import WarningText
from actckpt._text.sizes import format_bytes
from actckpt.planner.costs import BLOCK_INPUT
from actckpt.planner.plans import Plan

__all__ = ["PlannedSize", "given_bytes", "warns_of_larger"]


def given_bytes(arguments: Any) -> tuple[float, ...]:
    """Return the bytes of each tensor among arguments, including inner tensors; expanded ones count what they store."""
    return tuple(tensor.numel() * tensor.element_size() for tensor in tensors_in(arguments))


class PlannedSize:
    """Compares the inputs of the block that runs first in a forward with its plan. One object for all blocks of a
    model.

    Args:
        nbytes: the maximum per tensor for each block; blocks without an entry are not checked.
        count: returns the bytes of a block's argument tensors.
        exceeded: called with the name of a block that gets more, and with its training.
    """

    def __init__(
        self,
        nbytes: Mapping[str, tuple[float, ...]],
        count: Callable[[Any], tuple[float, ...]],
        exceeded: Callable[[Any, str, tuple[float, ...]], None],
    ) -> None:
        self._nbytes, self._count, self._exceeded = nbytes, count, exceeded
        self._is_over = False

    def close(self) -> None:
        """Stop checking."""
        self._is_over = True

    def check(self, name: str, training: Any, arguments: Any) -> None:
        """Compare a block's arguments with the plan."""
        if self._is_over or name not in self._nbytes:
            return
        sizes = self._count(arguments)
        if any(now > most for now, most in zip(sizes, self._nbytes[name], strict=False)):
            self._is_over = True
            self._exceeded(training, name, sizes)


def _hidden_bytes(arguments: Any) -> tuple[float, ...]:
    return (bytes_of(first_tensor(arguments)),)


_LARGER = WarningText(
    "apply: block {block!r} is given {given} of hidden states, and the plan was made for {planned}: memory may exceed "
    "its budget of {budget}.",
    "Make the plan with the largest batch, or use actckpt.apply(model, budget=...), which makes a plan for each size.",
    per="model",
)


class _Warning:
    """Warns that a plan for one size runs a larger one without being replanned."""

    def __init__(self, block: str, nbytes: float, plan: Plan) -> None:
        self._block, self._nbytes, self._budget_bytes = block, nbytes, plan.budget_bytes

    def __call__(self, _: Any, __: str, sizes: tuple[float, ...]) -> None:
        sizes_in_bytes = {"given": sizes[0], "planned": self._nbytes, "budget": self._budget_bytes}
        texts = {name: format_bytes(nbytes) for name, nbytes in sizes_in_bytes.items()}
        warn_user(_LARGER, block=self._block, **texts)


def warns_of_larger(plan: Plan) -> tuple[str, PlannedSize] | None:
    """Return the block of a plan that shows its size, and the check that warns if it gets more.

    It is the first one that held its hidden states in each call: the program itself holds the inputs of the model.
    """
    assert plan.blocks is not None
    held: dict[str, list[float]] = {}
    for block, name in zip(plan.costs.blocks, plan.blocks, strict=True):
        if name is not None:
            input_sizes = (value.nbytes for value in block.values if value.name == BLOCK_INPUT)
            held.setdefault(name, []).append(block.input_bytes or next(input_sizes, 0.0))
    first = next(((name, max(sizes)) for name, sizes in held.items() if all(sizes)), None)
    if first is None:
        return None
    shown, nbytes = first
    return shown, PlannedSize({shown: (nbytes,)}, _hidden_bytes, _Warning(shown, nbytes, plan))
