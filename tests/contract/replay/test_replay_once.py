"""What several dropped values are made from is replayed once in a backward, in any order of the steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import random_programs
import torch
from internals.stores import flush, store_of_kind
from oracle import assert_equal, leaf
from random_graphs import RandomGraph, chain, count, num_replayed
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt

pytestmark = pytest.mark.usefixtures("no_audit")


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("policy", ["recompute", ["aten.mm", "aten.mul.Tensor", "aten.native_layer_norm"]])
def test_no_operator_of_a_random_program_runs_more_than_once_more_per_backward(mode: int, policy: Any) -> None:
    for seed in random_programs.seeds():
        program = RandomGraph(seed)
        expected, forward, plain, num_backwards = count(program, mode, nullcontext())
        found, _, ours, _ = count(program, mode, actckpt.region(policy))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), seed
        for name, number in ours.items():
            if "as_strided" in name or "view" in name or "set_" in name or "empty" in name:
                continue
            assert number - plain[name] <= num_backwards * forward[name], (seed, name)


def test_an_order_of_ones_own_runs_no_operator_twice() -> None:
    asked: list[int] = []

    def as_in_forward(graph: Any) -> range:
        asked.append(len(graph.operators))
        return range(len(graph.operators))

    actckpt.configure(replay_order=as_in_forward)
    x = torch.linspace(0, 1, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(chain(x, 32), x)
    with actckpt.region():
        loss = chain(x, 32)
    found: list[Tensor] = []
    assert num_replayed(lambda: found.extend(torch.autograd.grad(loss, x))) <= 64
    assert torch.equal(found[0], expected)
    assert max(asked) == 33  # the last exponential and all additions before it


class _Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(16, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


def test_an_offloaded_product_of_a_batch_is_brought_back_once() -> None:
    """Backward reads it, and what is replayed does. Its view has a version counter of its own (`_unsafe_view`)."""
    model, x = _Gated(), leaf(4, 8, 16)
    weight = torch.randn(32, 5, requires_grad=True)

    def gradients(policy: Any) -> Any:
        with actckpt.region(policy):
            y = model(x) @ weight
        return torch.autograd.grad(y.square().sum(), [x, weight, *model.parameters()])

    expected = gradients("keep")
    with store_of_kind("memory"):
        for _ in range(3):
            actckpt.reset_stats()
            assert_equal(gradients({"gate::aten.mm.default": "offload"}), expected)
            flush()
        moved = actckpt.stats()
        assert moved.reloaded_bytes == moved.offloaded_bytes == 4 * 8 * 32 * 4


@pytest.mark.parametrize("through", ["the product", "its view"])
def test_a_change_of_such_a_product_while_backward_has_it_raises(through: str) -> None:
    """Each has a version counter of its own, and what was brought back shares only one of them."""
    x, w, weight = leaf(32, 16), leaf(16, 32), torch.randn(32, 5, requires_grad=True)
    kept: dict[str, Tensor] = {}

    def changed(grad: Tensor) -> None:
        kept[through].add_(1)

    with store_of_kind("memory"):
        for _ in range(2):
            with actckpt.region({"::aten.mm.default#0.0": "offload"}):
                product = x @ w
                view = torch.ops.aten._unsafe_view.default(product, (4, 8, 32))
                kept = {"the product": product.detach(), "its view": view.detach()}
                h = F.silu(view).exp()
                y = h @ weight
            flush()
            h.register_hook(changed)  # the replay of `h` has read it by then, and backward of silu reads it next
            with pytest.raises(actckpt.errors.SavedTensorChangedError):
                y.square().sum().backward()


class _Deep(torch.nn.Module):
    """Drops many values, which take more than a window that follows the sizes leaves in any case."""

    DEPTH = 160

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(self.DEPTH):
            x = (x + 0.01).sin()
        return x


def test_what_a_block_drops_is_replayed_once_whatever_its_size() -> None:
    x = torch.linspace(0, 1, 1024 * 64).view(1024, 64)

    def gradients(apply: Callable[[torch.nn.Module], object]) -> tuple[int, list[Tensor]]:
        model = torch.nn.Sequential(_Deep(), _Deep())
        apply(model)
        found: list[Tensor] = []
        step = lambda: found.extend(torch.autograd.grad(model(x).sum(), list(model.parameters())))  # noqa: E731
        step()  # the first run of a region is audited
        return num_replayed(step), found

    _, expected = gradients(lambda _: None)
    num, found = gradients(lambda model: actckpt.apply(model, [], blocks=_Deep))
    assert num == 2 * 2 * _Deep.DEPTH  # all but the last sine, whose result nothing saves
    assert_equal(found, expected)


def test_one_value_that_waits_is_not_replayed_twice_to_save_its_bytes() -> None:
    x, w = torch.randn(8192, 256, requires_grad=True), torch.randn(256, 8, requires_grad=True)
    for _ in range(2):
        with actckpt.region([]):
            loss = (x.sin().cos() @ w).sum()  # backward asks for the cosine, then for the sine
        num = num_replayed(loss.backward)
    assert num == 2


def _gradient(order: Callable[[actckpt.ReplayGraph], Any] | None) -> torch.Tensor:
    torch.manual_seed(3)
    x = leaf(5)
    actckpt.configure(replay_order=order)
    with actckpt.region():
        y = ((x * 2).sin() + (x * 3).cos()).exp().tanh()
    y = y * 1.5
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return gradient


@pytest.mark.parametrize(
    "order",
    [
        lambda graph: range(len(graph.operators)),
        lambda graph: tuple(range(len(graph.operators))),
        lambda graph: iter(range(len(graph.operators))),
        lambda graph: torch.arange(len(graph.operators)),
        lambda graph: sorted(
            range(len(graph.operators)), key=lambda step: (graph.operators[step] != "aten.mul.Tensor", step)
        ),
    ],
    ids=["range", "tuple", "iterator", "tensor", "products first"],
)
def test_orders_in_any_container_give_the_same_gradients(order: Any) -> None:
    asked: list[actckpt.ReplayGraph] = []

    def noting(graph: actckpt.ReplayGraph) -> Any:
        asked.append(graph)
        return order(graph)

    assert_equal(_gradient(noting), _gradient(None))
    assert max(len(graph.operators) for graph in asked) >= 5


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda graph: None, r"returned None, a NoneType\. Return the numbers of the \d+ steps"),
        (lambda graph: 3, "returned 3, a int"),
        (lambda graph: graph.operators, r"returned \('aten\.mul\.Tensor', .*a tuple"),
        (lambda graph: [float(step) for step in range(len(graph.operators))], r"returned \[0\.0, .*a list"),
        (lambda graph: [-1], "-1 is not one of the"),
        (lambda graph: range(len(graph.operators) + 1), r"(\d+) is not one of the \1 steps"),
        (lambda graph: [0, *range(len(graph.operators))], r"step 0 \(aten\.mul\.Tensor\) is there twice"),
        (lambda graph: range(len(graph.operators))[::-1], "which comes later or never"),
        (lambda graph: range(1, len(graph.operators)), "which comes later or never"),
        (lambda graph: range(len(graph.operators) - 1), "which makes the target, is missing"),
        (lambda graph: [], "is missing among the 0 steps"),
    ],
    ids=range(11),
)
def test_what_is_no_order_is_refused_in_one_line(order: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^replay_order: .*{message}[^\n]*$"):
        _gradient(order)
