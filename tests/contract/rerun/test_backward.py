"""Every way of running backward: bit-equal to plain autograd and to torch's checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import (
    BOTH,
    Checkpoint,
    Programs,
    assert_as_plain,
    assert_equal,
    gradients,
    in_region,
    leaf,
    mlp,
    ours,
    plain,
)

import actckpt

programs = Programs()


@pytest.mark.parametrize("name", programs)
def test_every_way_of_running_backward_is_bit_equal(name: str) -> None:
    assert_as_plain(programs[name])


@pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
def test_a_second_backward_over_a_freed_graph_raises_autograds_error(method: Checkpoint) -> None:
    y = method(mlp(), leaf(3, 8)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@programs
def second_and_third_derivatives(checkpoint: Checkpoint) -> Any:
    x, w = leaf(3), leaf(3)
    y = checkpoint(lambda x, *, w: (x.sin() * w).exp().tanh(), x.cos(), w=w.cos())
    first = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w), create_graph=True)
    third = torch.autograd.grad(sum(g.sin().sum() for g in second), (x, w))
    return y, first, second, third


@pytest.mark.parametrize("policy", ["recompute", ["aten.exp"], "offload"], ids=str)
def test_second_and_third_derivatives_of_regions_are_bit_equal(policy: Any) -> None:
    results = []
    for method in (plain, in_region(policy)):
        torch.manual_seed(7)
        results.append(second_and_third_derivatives(method))
    assert_equal(*results)


@programs.each(early_stop=[True, False], create_graph=[True, False])
def a_backward_inside_the_region(checkpoint: Checkpoint, early_stop: bool, create_graph: bool) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
        return (grad.square() * model(x).tanh()).exp()

    keywords = {} if checkpoint.__name__ == "plain" else {"early_stop": early_stop}
    model, x = mlp(dropout=0.3), leaf(2, 8)
    y = checkpoint(function, x.sin(), **keywords)
    y.sum().backward()
    return y, x.grad, gradients(model)


@programs
def a_vector_jacobian_product_in_batches(checkpoint: Checkpoint) -> Any:
    x = leaf(4)
    y = checkpoint(lambda x: (x.sin() * x.flip(0)).exp(), x)
    return torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)


def test_hooks_on_inputs_results_and_inside_run_as_often_as_with_torch() -> None:
    counts = {}
    for name, method in BOTH.items():
        calls: list[str] = []

        def function(x: torch.Tensor, calls: list[str] = calls) -> torch.Tensor:
            y = x.exp()
            y.register_hook(lambda _: calls.append("inside"))
            return y.sin()

        x = leaf(3)
        middle = x * 2
        middle.register_hook(lambda _, calls=calls: calls.append("input"))
        y = method(function, middle)
        y.register_hook(lambda _, calls=calls: calls.append("result"))
        y.sum().backward()
        counts[name] = calls
    assert counts["actckpt"] == counts["torch"] == ["result", "inside", "input"]


def test_saved_tensors_are_readable_through_grad_fn_outside_of_backward() -> None:
    model, x = mlp(dropout=0.5), leaf(3, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x).exp()

    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    y = ours(function, x)
    state = torch.get_rng_state()
    assert_equal(y.grad_fn._saved_result.detach(), expected.detach())
    assert_equal(y.grad_fn._saved_result.detach(), expected.detach())
    assert_equal(torch.get_rng_state(), state)
    assert y.grad_fn._raw_saved_result is not None
    expected.sum().backward()
    grad, x.grad = x.grad, None
    y.sum().backward()
    assert_equal(x.grad, grad)


def test_saved_tensors_of_another_node_are_readable_within_backward() -> None:
    x, seen = leaf(3), []
    y = ours(lambda x: x.exp(), x)
    z = y * 1
    z.register_hook(lambda _: seen.append(y.grad_fn._saved_result.clone()))
    z.sum().backward()
    assert_equal([*seen, x.grad], [x.detach().exp()] * 2)


def test_anomaly_mode_names_the_forward_of_a_failing_operator() -> None:
    x = torch.zeros(2, requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection has been enabled"),
        torch.autograd.detect_anomaly(),
    ):
        y = ours(lambda x: x.sqrt() * 0, x)
        with pytest.warns(UserWarning, match="Error detected in SqrtBackward0"), pytest.raises(RuntimeError):
            y.sum().backward()


def test_backward_in_a_mode_without_grad_still_reruns_with_grad() -> None:
    x = leaf(3)
    y = ours(lambda x: x.sin().exp(), x)
    with torch.no_grad():
        torch.autograd.backward(y, torch.ones(3))
        assert not torch.is_grad_enabled()
    assert_equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_requires_grad_switched_off_before_backward_raises_or_is_right() -> None:
    model, x = mlp(), leaf(3, 8)
    y = ours(model, x)
    model.requires_grad_(False)
    with pytest.raises(actckpt.errors.RerunMismatchError):
        y.sum().backward()
