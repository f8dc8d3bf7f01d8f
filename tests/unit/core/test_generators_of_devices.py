"""Reruns restore the generators of the devices that their inputs are on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from oracle import Checkpoint, assert_equal, leaf, plain

import actckpt
from actckpt._core import devices
from actckpt._core.devices import Accelerator

#: A device's random state, where reruns do not find it: they put back what objects and lists hold.
_drawn: ContextVar[int] = ContextVar("_drawn", default=0)


def _draw() -> int:
    _drawn.set(_drawn.get() + 1)
    return _drawn.get()


class _Counting(Accelerator):
    """Stands for the accelerator of meta tensors: its one device draws random numbers by counting."""

    @property
    def module(self) -> Any:
        return self

    def current_index(self) -> int | None:
        return 0

    def get_rng_state(self, index: int) -> torch.Tensor:
        return torch.tensor([_drawn.get()])

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        _drawn.set(int(state))


def _given(x: torch.Tensor, there: torch.Tensor, draw: Callable[..., Any], checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint(draw, x, there)


def _in_keywords(
    x: torch.Tensor, there: torch.Tensor, draw: Callable[..., Any], checkpoint: Checkpoint
) -> torch.Tensor:
    return checkpoint(lambda x, held: draw(x, held["there"]), x, held={"there": there})


def _in_closure(x: torch.Tensor, there: torch.Tensor, draw: Callable[..., Any], checkpoint: Checkpoint) -> torch.Tensor:
    return checkpoint(lambda x: draw(x, there), x)


@pytest.mark.parametrize("given", [_given, _in_keywords, _in_closure])
@pytest.mark.parametrize("hold", ["as they are", "offloaded", "in hooks", "nested", "in a region"])
def test_the_generator_of_a_device_is_restored_however_inputs_are_held(given: Callable[..., Any], hold: str) -> None:
    """Also where what is outside packs them: what is left of the inputs then has no device."""
    undo = devices.register(_Counting("meta"))
    x, there = leaf(3), torch.empty(2, device="meta")

    def draw(x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return (x * _draw()).exp()

    def run(checkpoint: Checkpoint) -> torch.Tensor:
        _drawn.set(0)
        if hold == "nested":
            y = checkpoint(lambda x, there: given(x, there, draw, checkpoint).sin(), x, there)
        elif hold == "in hooks":
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                y = given(x, there, draw, checkpoint)
        else:
            y = given(x, there, draw, checkpoint)
        _draw()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert _drawn.get() == 2
        return gradient

    def ours_so(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return actckpt.checkpoint(function, *args, offload_inputs=hold == "offloaded", **kwargs)

    try:
        with actckpt.region("keep") if hold == "in a region" else nullcontext():
            assert_equal(run(ours_so), run(plain))
    finally:
        undo()
