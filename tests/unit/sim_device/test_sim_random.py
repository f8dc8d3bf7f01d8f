"""Random state of regions over two devices: reruns draw what the forward drew on each, whatever the inputs are on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sim.device import accelerator
from torch import Tensor
from torch.nn import functional

import actckpt

Method = Callable[..., Any]


METHODS: dict[str, Method] = {
    "checkpoint": actckpt.checkpoint,
    "offload_inputs": partial(actckpt.checkpoint, offload_inputs=True),
    "nested": lambda function, *args: actckpt.checkpoint(lambda *own: actckpt.checkpoint(function, *own), *args),
    "region": lambda function, *args: actckpt.region("recompute")(function)(*args),
    "policy": partial(actckpt.checkpoint, policy="recompute"),
}


def _split(x: Tensor) -> Tensor:
    """Draw on a device that nothing was given on."""
    there = functional.dropout(x.exp(), 0.5).to("sim:1")
    there = functional.dropout(there.sin(), 0.5)
    return (there * torch.rand(8, 8, device="sim:1")).tanh().to(x.device)


def _gradients(method: Method, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    y = method(_split, x)
    torch.rand(5, device="sim:1")  # what comes between forward and backward
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    return [gradient, *torch.sim.get_rng_state_all()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_what_is_drawn_on_a_device_without_inputs_is_drawn_again(name: str, home: str) -> None:
    x = torch.randn(8, 8, device=home, requires_grad=True)
    with accelerator.offloading():
        found = _gradients(METHODS[name], x)
    expected = _gradients(lambda function, *args: function(*args), x)
    assert all(map(torch.equal, found, expected))
