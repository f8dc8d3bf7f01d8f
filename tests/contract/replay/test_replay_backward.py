"""All ways to run backward over a region, what they hold, and what is left afterwards."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from internals.stores import flush
from oracle import CountOperators, assert_equal, in_offload, in_region, in_threads, leaf, mlp, no_collector, soon
from torch import Tensor

import actckpt

#: Checksums are operators too, and some of these tests count operators.
pytestmark = pytest.mark.usefixtures("no_audit")


@pytest.mark.parametrize("is_other_first", [False, True])
@pytest.mark.parametrize("policy", [["aten.sin"], actckpt.policies.PerOp({"aten.sin": actckpt.Action.OFFLOAD})])
def test_what_is_kept_may_be_overwritten_while_a_backward_inside_an_open_region_frees_its_graph(
    policy: Any, is_other_first: bool
) -> None:
    found = []
    for region in (nullcontext, lambda: actckpt.region(policy)):
        x = torch.linspace(-1, 1, 16).requires_grad_()
        with region():
            kept, other = x.sin(), (2 * x).sin()
            middle = kept.exp()
            ends = middle.sin(), middle.cos(), other.exp()

            def overwrite(_: Tensor, overwritten: list[Tensor] = [other, kept]) -> None:  # noqa: B006 - for one call
                with torch.no_grad():
                    while len(overwritten) > (1 if is_other_first else 0):
                        overwritten.pop(0).mul_(2)

            hook = middle.register_hook(overwrite)
            first = torch.autograd.grad(ends[0].sum(), middle)
            hook.remove()
            with torch.no_grad():
                kept.mul_(2)
        del kept, other, middle
        found.append((first, torch.autograd.grad(ends[1].sum() + ends[2].sum(), x)))
    assert_equal(found[1], found[0])


def test_rule_7_an_input_changed_after_the_region_raises_and_values_without_it_work() -> None:
    weight, other = leaf(3, 3), leaf(3, 3)
    x = torch.randn(3, 3)
    with actckpt.region():
        a = (x * weight).sin()
        b = other.exp().sin()
    x.add_(1)
    assert_equal(torch.autograd.grad(b.sum(), other), torch.autograd.grad(other.exp().sin().sum(), other))
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match=r"(?s)at version 1; expected version 0"):
        a.sum().backward()


@pytest.mark.parametrize("is_parameter", [True, False])
def test_rule_8_a_storage_from_outside_that_was_freed_raises_a_clear_error(is_parameter: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4)) if is_parameter else torch.randn(4, 4)
    x, kind = leaf(4, 4), "a parameter" if is_parameter else "an input"
    with actckpt.region():
        y = (weight.sin() @ x).sin()
    storage = weight.untyped_storage()
    bytes_before = weight.detach().clone()
    storage.resize_(0)
    with pytest.raises(
        actckpt.errors.SavedTensorChangedError,
        match=rf"(?s){kind} .*shape \(4, 4\).*0 bytes now; 64.*inside each unit",
    ):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    storage.resize_(64)
    with torch.no_grad():
        weight.data.copy_(bytes_before)
    assert_equal(torch.autograd.grad(y.sum(), x), torch.autograd.grad((weight.sin() @ x).sin().sum(), x))


def test_eight_threads_with_regions_of_their_own_and_one_in_common() -> None:
    torch.manual_seed(1)
    model = mlp(8, depth=3)
    inputs = [torch.randn(4, 8) for _ in range(8)]
    parameters = list(model.parameters())
    expected = [torch.autograd.grad(model(x).square().sum(), parameters) for x in inputs]
    with actckpt.region():
        shared = model(inputs[0]).square().sum()

    def work(number: int) -> None:
        for _ in range(5):
            with actckpt.region():
                loss = model(inputs[number]).square().sum()
            assert_equal(torch.autograd.grad(loss, parameters), expected[number])
            assert_equal(torch.autograd.grad(shared, parameters, retain_graph=True), expected[0])

    in_threads(work, 8)


def test_an_exception_in_forward_leaves_the_thread_as_it_was() -> None:
    x = leaf(3)
    made = []
    with pytest.raises(KeyError), actckpt.region():
        made.append(x.sin().exp())
        raise KeyError
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with CountOperators() as counted:
        x.sin().exp()
    assert counted.total == 2
    assert_equal(torch.autograd.grad(made.pop().sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))


@pytest.mark.parametrize("policy", ["recompute", ["aten.sin"], "offload"])
@pytest.mark.parametrize("ends", ["backward", "dropped", "failed"])
def test_nothing_is_referenced_after_the_graph_is_gone(policy: Any, ends: str) -> None:
    with actckpt.region(policy):
        leaf(4).sin().exp().sum().backward()  # the first policy of a process imports modules, whose frames are cycles
    with no_collector():
        x = torch.randn(4, requires_grad=True)
        given = torch.randn(4)
        with actckpt.region(policy) as region:
            middle = (x * given).sin()
            y = (middle * given).exp().sum()
        references = [weakref.ref(tensor) for tensor in (middle, given, y, x)]
        if ends == "backward":
            y.backward()
        elif ends == "failed":
            given.add_(1)
            if policy != "offload":
                with pytest.raises(actckpt.errors.SavedTensorChangedError):
                    y.backward()
        del middle, given, y, x, region
        assert ends == "failed" or soon(lambda: all(reference() is None for reference in references))
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_a_region_left_open_over_training_steps_warns_once_and_is_right() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with actckpt.region():
                found = [torch.autograd.grad((x @ w).sin().exp().sum(), w)[0] for _ in range(5)]
    assert [str(warning.message).count("still open") for warning in caught] == [1]
    expected = torch.autograd.grad((x @ w).sin().exp().sum(), w)[0]
    assert all(torch.equal(gradient, expected) for gradient in found)


class _ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.mul_(3)


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_backward_that_changes_what_it_saved_spoils_nothing_else(is_replayed: bool) -> None:
    """Plain autograd raises at the other's unpack. Right gradients are as good; other numbers are not."""

    def function(x: Tensor) -> Tensor:
        y = (x * 2).sin()
        return (y * x + _ChangesWhatItSaved.apply(y)).sum()

    x = torch.rand(8, requires_grad=True)
    loss = (in_region() if is_replayed else in_offload())(function, x)
    flush()
    try:
        (gradient,) = torch.autograd.grad(loss, x)
    except RuntimeError as error:
        assert "inplace" in str(error) and not is_replayed, "it is replayed again"
    else:
        y, slope = (x * 2).sin(), 2 * (x * 2).cos()
        torch.testing.assert_close(gradient, (y + (x + 3 * y) * slope).detach())
