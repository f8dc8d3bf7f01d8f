"""Operators on the simulated device give what they give on the CPU, bit for bit, and so do their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

IN, OUT = (5, 6), (6, 5)

#: A function, and the shapes of its tensors: one of each way to reach a kernel of the CPU.
#: Models train in test_sim_machine.py.
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "scalars": (lambda x: 2.5 * x + 1 - x / 3, (IN,)),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2), ((2, 3, 20, 20), (8, 3, 3, 3), (8,))),
    "no weight": (lambda x: F.batch_norm(x, None, None, training=True), ((6, 4, 5),)),
    "several results": (lambda x: torch.var_mean(x, 0), (IN,)),
    "results of which one is an index": (lambda x: x.topk(2)[0], (IN,)),
    "a list of tensors": (lambda x, y: torch.cat([x, y]), (IN, IN)),
    "views": (lambda x: [part * 2 for part in x.chunk(2, -1)], (IN,)),
    "index": (lambda x: x[torch.tensor([2, 0], device=x.device)], (IN,)),
    "index of the CPU": (lambda x: x[torch.tensor([2, 0])], (IN,)),
    "mask, whose result has any size": (lambda x: x[x > 0], (IN,)),
    "scatter": (lambda x: x.scatter_add(1, torch.zeros(5, 6, dtype=torch.long, device=x.device), x), (IN,)),
    "in place": (
        lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), torch.ones(1, 6, device=x.device)),
        (IN,),
    ),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * 2), ((5, 2),)),
    "conjugated product": (
        lambda x: torch.view_as_real(torch.view_as_complex(x).conj() @ torch.view_as_complex(x).mT),
        ((4, 3, 2),),
    ),
    "decomposition": (lambda x: torch.linalg.svd(x, full_matrices=False)[1], (IN,)),
    "solver": (torch.linalg.solve, ((4, 4), (4, 2))),
    "contiguous copies": (lambda x: x.permute(2, 0, 1).reshape(4, -1).expand(3, 4, 6).contiguous(), ((2, 3, 4),)),
    "bfloat16": (lambda x, y: (x.bfloat16() @ y.bfloat16()).float(), (IN, OUT)),
    "half": (lambda x, y: (x.half() @ y.half()).float(), (IN, OUT)),
    "transform": (lambda x: torch.fft.rfft(x).abs(), (IN,)),
}


def _outcome(function: Callable[..., Any], inputs: list[Tensor], device: str) -> list[Tensor]:
    own = [value.detach().clone().to(device).requires_grad_() for value in inputs]
    found = function(*own)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    weights = [torch.arange(output.numel(), device=device).view(output.shape).cos() for output in outputs]
    loss = sum((output.float() * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    assert isinstance(loss, Tensor)
    everything = [*outputs, *torch.autograd.grad(loss, own)]
    assert all(value.device.type == device for value in everything)
    return [value.detach().cpu() for value in everything]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_their_gradients_are_those_of_the_cpu(name: str) -> None:
    function, shapes = OPERATORS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    expected, found = _outcome(function, inputs, "cpu"), _outcome(function, inputs, "sim")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_tensors_of_two_devices_are_refused_but_for_scalars_and_indices() -> None:
    ours = torch.ones(3, device="sim:0")
    for other in (torch.ones(3), torch.ones(3, device="sim:1")):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            ours + other
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert torch.ones(3, device="sim:1").copy_(ours * 2).tolist() == [2, 2, 2]
