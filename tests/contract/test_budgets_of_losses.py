"""Budgets count what a program computes from the outputs of a model: as little as backward shows, and enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
from oracle import assert_equal
from residual_mlp import Mlp
from torch import Tensor, nn
from torch.nn import functional

import actckpt
from actckpt.memory import LiveStorages

DIM, CLASSES = 32, 1024


class Classifier(nn.Module):
    """Returns its loss beside its wide outputs, as models of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mlp(DIM) for _ in range(4))
        self.head = nn.Linear(DIM, CLASSES)
        self.x, self.y = torch.randn(256, DIM), torch.randint(0, CLASSES, (256,))

    def forward(self) -> dict[str, Tensor]:
        x = self.x
        for block in self.blocks:
            x = block(x)
        outputs = self.head(x)
        return {"loss": functional.cross_entropy(outputs, self.y), "outputs": outputs}


def _own(found: dict[str, Tensor]) -> None:
    found["loss"].backward()


def _own_with_accuracy(found: dict[str, Tensor]) -> None:
    with torch.no_grad():
        assert found["outputs"].softmax(-1).max() <= 1
    found["loss"].backward()


def _own_by_edge(found: dict[str, Tensor]) -> None:
    torch.autograd.backward([torch.autograd.graph.get_gradient_edge(found["loss"])], [torch.ones(())])  # type: ignore[list-item]


def _squares(found: dict[str, Tensor]) -> None:
    found["outputs"].square().mean().backward()


def _squares_of_part(found: dict[str, Tensor]) -> None:
    (found["loss"] * 2 + found["outputs"].t()[:, 1:].square().mean()).backward()


def _one_after_the_other(found: dict[str, Tensor]) -> None:
    found["loss"].backward(retain_graph=True)
    found["outputs"].square().mean().backward()


def _step(model: Classifier, backward: Callable[[dict[str, Tensor]], None]) -> tuple[list[Tensor], int]:
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        backward(model())
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], live.peak_bytes


def _smallest_bytes(backward: Callable[[dict[str, Tensor]], None]) -> int:
    model = Classifier()
    actckpt.apply(model, activation_budget="1B", on_infeasible="raise")
    _step(model, backward)
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as caught:
        _step(model, backward)
    assert caught.value.smallest_bytes is not None
    return int(caught.value.smallest_bytes) + 1


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shares = x.softmax(-1)
        result = shares * shares
        ctx.save_for_backward(shares)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        gradient = 2 * gradients[0] * shares
        return shares * (gradient - (gradient * shares).sum(-1, keepdim=True))


def _by_function(found: dict[str, Tensor]) -> None:
    _Softmax.apply(found["outputs"]).sum().backward()  # type: ignore[no-untyped-call]


def _with_metric(found: dict[str, Tensor]) -> None:
    shares = found["outputs"].softmax(-1)
    found["loss"].backward()
    assert shares.max() <= 1


def _with_weights(found: dict[str, Tensor]) -> None:
    weight = torch.full((2 * CLASSES, CLASSES), 1e-3, requires_grad=True)
    functional.linear(found["outputs"], weight).square().mean().backward()
    assert weight.grad is not None


def _cast(found: dict[str, Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = found["outputs"].bfloat16() * 2
        loss = functional.cross_entropy(outputs, torch.zeros(256, dtype=torch.long))
    loss.backward()


def _from_leaf_too(found: dict[str, Tensor]) -> None:
    torch.autograd.backward([found["outputs"].square().mean(), torch.ones((), requires_grad=True)])


OWN = [_own, _own_with_accuracy, _own_by_edge]
OTHERS = [
    *(_squares, _squares_of_part, _one_after_the_other, _by_function, _with_metric, _with_weights, _cast),
    _from_leaf_too,
]


def _num_steps() -> int:
    """Return after how many steps the peak is the plan's: on a device, audits of the first ones are left out."""
    return 3 if on_device.device_type == "cpu" else 7


@pytest.mark.parametrize("backward", [*OWN, *OTHERS])
def test_the_smallest_budget_has_room_for_what_is_computed_from_outputs(backward: Any) -> None:
    expected, plain_bytes = _step(Classifier(), backward)
    smallest_bytes = _smallest_bytes(backward)
    assert backward not in OWN or smallest_bytes < plain_bytes
    model = Classifier()
    actckpt.apply(model, activation_budget=smallest_bytes, race=False, on_infeasible="raise")
    for _ in range(_num_steps()):
        gradients, peak_bytes = _step(model, backward)
        assert_equal(gradients, expected)
    assert peak_bytes <= smallest_bytes


def test_a_loss_of_the_model_needs_less_than_one_that_is_computed_from_its_outputs() -> None:
    output_bytes = 4 * 256 * CLASSES
    assert _smallest_bytes(_squares) >= _smallest_bytes(_own) + 0.9 * output_bytes


def test_two_forwards_that_lead_to_one_loss_are_both_counted() -> None:
    def train(found: dict[str, Tensor]) -> None:
        (found["outputs"] - found["second"]["outputs"]).square().mean().backward()

    class Both(Classifier):
        def __call__(self) -> dict[str, Any]:
            return {**super().__call__(), "second": super().__call__()}

    expected, plain_bytes = _step(Both(), train)
    model = Both()
    actckpt.apply(model, activation_budget="1B", on_infeasible="raise")
    _step(model, train)
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as caught:
        _step(model, train)
    smallest_bytes = caught.value.smallest_bytes
    assert smallest_bytes is not None
    assert smallest_bytes <= plain_bytes or on_device.device_type != "cpu", "on devices it is predicted"
    model = Both()
    actckpt.apply(model, activation_budget=smallest_bytes, race=False, on_infeasible="raise")
    for _ in range(_num_steps()):
        gradients, peak_bytes = _step(model, train)
        assert_equal(gradients, expected)
    assert peak_bytes <= smallest_bytes
