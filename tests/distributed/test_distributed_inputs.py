"""`actckpt.te.checkpoint(distribute_saved_activations=True)`: each rank holds a part of the input."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pool import Ranks
from torch import Tensor

import actckpt

_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "odd": lambda x: x[:3, :5].contiguous(),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "bfloat16": lambda x: x.bfloat16(),
    "one": lambda x: x[:1, :1].contiguous(),
    "view": lambda x: x[1:],
}


def _check(layout: str) -> None:
    torch.manual_seed(1)
    weight, source = (torch.randn(rows, 8, requires_grad=True) for rows in (8, 6))
    strides = []

    def function(x: Tensor, weight: Tensor, scale: float) -> Tensor:
        strides.append(x.stride())
        return (torch.nn.functional.dropout(x.float(), 0.3) @ weight[: x.shape[1]] * scale).exp()

    results = []
    for distribute in (False, True):
        torch.manual_seed(2)
        x = _LAYOUTS[layout](source) * 1  # not a leaf: only the region holds it
        held, options = weakref.ref(x), {"distribute_saved_activations": distribute, "tp_group": dist.group.WORLD}
        stride = x.stride()
        y = actckpt.te.checkpoint(function, x, weight, 2.0, **options)
        del x
        gc.collect()
        assert held() is None or not distribute, "the region keeps the whole input"
        for _ in range(2):
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), (source, weight), retain_graph=True)])
    assert all(torch.equal(a, b) for found in results for a, b in zip(found, results[0], strict=True))
    assert set(strides) == {stride}


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_distributed_input_gives_the_same_gradients_on_two_ranks(layout: str, ranks: Ranks) -> None:
    ranks.run(_check, layout)
