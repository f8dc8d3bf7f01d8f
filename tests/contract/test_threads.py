"""Backward in several threads, through shared and separate graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal, in_threads, leaf, mlp, ours, plain

import actckpt


def _nested(checkpoint: Callable[..., Any], depth: int, x: torch.Tensor, *, w: torch.Tensor) -> torch.Tensor:
    x = torch.nn.functional.dropout((x * w).sin(), 0.3)
    if depth:
        x = x + checkpoint(_nested, checkpoint, depth - 1, x.cos(), w=w.sin())
    return torch.nn.functional.dropout(x.tanh(), 0.3)


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("depth", [0, 2])
def test_threads_that_share_one_graph_get_the_gradients_of_one(count: int, depth: int) -> None:
    x, w = leaf(64), leaf(64)
    torch.manual_seed(2)
    expected = torch.autograd.grad(_nested(plain, depth, x, w=w).sum(), (x, w))
    torch.manual_seed(2)
    y = ours(_nested, ours, depth, x, w=w).sum()
    state = torch.get_rng_state()
    for _ in range(5):
        for result in in_threads(lambda _: torch.autograd.grad(y, (x, w), retain_graph=True), count):
            assert_equal(result, expected)
    assert_equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_threads_with_separate_graphs_get_their_own_gradients_also_beside_a_rerun_that_fails(
    preserve_rng_state: bool,
) -> None:
    models = [mlp(dropout=0.3 if preserve_rng_state else 0.0) for _ in range(8)]
    inputs = [leaf(3, 8) for _ in models]

    def losses(method: Callable[..., Any], **options: bool) -> list[torch.Tensor]:
        torch.manual_seed(4)
        return [method(model, x, **options).square().sum() for model, x in zip(models, inputs, strict=True)]

    def gradients(loss: torch.Tensor, i: int) -> Any:
        return torch.autograd.grad(loss, [inputs[i], *models[i].parameters()])

    def fail(x: torch.Tensor) -> torch.Tensor:
        if forward_is_over.is_set():
            raise KeyError("rerun")
        return x.sin().exp()

    forward_is_over = threading.Event()
    expected = [gradients(loss, i) for i, loss in enumerate(losses(plain))]
    found, failing = losses(ours, preserve_rng_state=preserve_rng_state), ours(fail, leaf(3)).sum()
    forward_is_over.set()
    state = torch.get_rng_state()

    def work(i: int) -> Any:
        if i < 8:
            return gradients(found[i], i)
        with pytest.raises(KeyError, match="rerun"):
            failing.backward()
        return None

    assert_equal(in_threads(work, 9)[:8], expected)
    assert_equal(torch.get_rng_state(), state)


def test_eight_threads_accumulate_into_shared_parameters() -> None:
    model, x = mlp(), torch.randn(3, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    losses = [ours(model, x).sum() for _ in range(8)]
    in_threads(lambda i: losses[i].backward(), 8)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 8 * grad)  # the order of additions is not fixed


def test_eight_threads_run_whole_steps_with_generators_of_their_own() -> None:
    def step(i: int, method: Callable[..., Any]) -> Any:
        generator = torch.Generator().manual_seed(i)
        x = torch.linspace(-1, 1, 16).requires_grad_()

        def function(x: torch.Tensor, *, generator: torch.Generator) -> torch.Tensor:
            return (x * torch.rand(16, generator=generator)).exp() * torch.rand(16, generator=generator)

        grads = []
        for _ in range(5):
            grads += torch.autograd.grad(method(function, x, generator=generator).sum(), x)
        return grads

    expected = [step(i, plain) for i in range(8)]
    assert_equal(in_threads(lambda i: step(i, ours), 8), expected)


def test_backward_in_another_thread_than_forward_restores_thread_local_state() -> None:
    model, x = mlp(), leaf(3, 8)
    with torch.autocast(x.device.type, torch.bfloat16):
        y = ours(model, x)
    expected = torch.autograd.grad(ours(model, x.detach().requires_grad_()).sum(), list(model.parameters()))
    actual = in_threads(lambda _: torch.autograd.grad(y.float().sum(), list(model.parameters())), 1)[0]
    with torch.autocast(x.device.type, torch.bfloat16):
        plain_y = model(x)
    assert_equal(actual, torch.autograd.grad(plain_y.float().sum(), list(model.parameters())))
    assert not torch.equal(actual[0], expected[0])


def test_a_thread_that_trained_under_a_budget_leaves_no_dispatch_mode() -> None:
    """Torch would free it after the thread has ended; a process that ended meanwhile aborted."""
    left: list[int] = []

    class Last:
        """Deleted after what the thread had before."""

        def __del__(self) -> None:
            left.append(torch._C._len_torch_dispatch_stack())

    of_thread = threading.local()

    def train(_: int) -> None:
        model = torch.nn.Sequential(*(mlp() for _ in range(3)))
        actckpt.apply(model, activation_budget="80%", race=False)
        model(leaf(3, 8)).sum().backward()
        of_thread.last = Last()

    in_threads(train, 2)
    assert left == [0, 0]
