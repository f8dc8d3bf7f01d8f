"""Reruns where autograd saves nested tensors of the strided layout, which have no shape."""

from __future__ import annotations

import warnings
from typing import Any

import on_device
import pytest
import torch
from oracle import assert_equal
from torch import Tensor, nn

import actckpt


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    if on_device.device_type != "cpu":
        pytest.skip("the simulated device has no kernels of nested tensors")


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        heads = [each(x).unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        # On a CPU that of jagged ones is computed with the strided layout.
        return x + nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)


def _jagged(*lengths: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of prototypes
        parts = [torch.randn(length, 8) for length in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)


def _gradients(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    model.zero_grad()
    y = actckpt.checkpoint(model, x, **options) if options else model(x)
    y.values().square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"determinism_check": "none"}, {"policy": []}], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_gradients_are_those_of_plain_training(options: dict[str, Any]) -> None:
    model, x = _Attention(), _jagged(3, 5)
    assert_equal(_gradients(model, x, **options), _gradients(model, x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_other_sizes_in_a_rerun_are_told() -> None:
    model, inputs = _Attention(), iter((_jagged(3, 5), _jagged(3, 6)))
    y = actckpt.checkpoint(lambda _: model(next(inputs)), torch.ones(1, requires_grad=True), use_reentrant=False)
    with pytest.raises(actckpt.errors.RerunMismatchError, match="saved a tensor that is different from its forward's"):
        y.values().square().sum().backward()
