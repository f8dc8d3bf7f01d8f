"""Programs whose gradients, or whose errors, were once wrong under replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import assert_equal
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt

KEPT = [["aten.mul"], ["aten.mul_"], "recompute"]


@pytest.fixture(autouse=True)
def _no_audit() -> Iterator[None]:
    """Let nothing that is wrong be put right by an audit."""
    before = actckpt.configure().audit
    actckpt.configure(audit="off")
    yield
    actckpt.configure(audit=before)


def _gradients(program: Any, region: Any) -> Any:
    torch.manual_seed(3)
    x = torch.randn(8, 4, requires_grad=True)
    return torch.autograd.grad(program(x, region).sum(), x)


def _assert_as_plain(program: Any, policy: Any = "recompute") -> None:
    assert_equal(_gradients(program, lambda: actckpt.region(policy)), _gradients(program, nullcontext))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "offload", ["aten.rrelu_with_noise"]])
def test_noise_that_autograd_saves_before_an_operator_writes_it_comes_back_written(in_place: bool, policy: Any) -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        x = x * 2
        with region():
            x = F.rrelu(x, training=True, inplace=in_place)
            return F.rrelu(x * 3, training=True) * x

    _assert_as_plain(program, policy)


@pytest.mark.parametrize("training", [False, True])
def test_statistics_that_batch_norm_writes_unseen_can_be_saved(training: bool) -> None:
    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        mean, variance = torch.zeros(4), torch.ones(4)
        with region():
            y = F.batch_norm(x.sin(), mean, variance, training=True)
            y = F.batch_norm(y.cos(), mean, variance, training=training)
            return y.sin() * variance * mean

    _assert_as_plain(program)
    _assert_as_plain(program, lambda info: actckpt.Action.RECOMPUTE)


def test_a_value_asks_the_policy_of_the_region_where_it_was_born() -> None:
    asked = []

    def policy(info: Any) -> Any:
        asked.append(info.op)
        return actckpt.Action.KEEP

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            y = x.exp()
            with actckpt.region("recompute") if region is not nullcontext else nullcontext():
                return y.sin().tanh()

    _assert_as_plain(program, policy)
    # The parameter was born nowhere. Its operator's result was born outside, and saved inside too.
    assert asked == [torch.ops.aten.exp.default]


def test_audits_leave_64_bit_tensors_as_they_are() -> None:
    actckpt.configure(audit="always")

    def program(x: torch.Tensor, region: Any) -> torch.Tensor:
        with region():
            y = x.double().sin()
            values, _ = (y * y).sort(dim=0)
            return values.exp()

    _assert_as_plain(program)


def test_in_place_foreach_operators_count_versions_up_under_the_recorder() -> None:
    x = torch.ones(4, requires_grad=True)
    before = x * 2
    used = before.sin()  # saved outside of the region, so that autograd itself must notice
    with actckpt.region("recompute"), torch.no_grad():
        torch._foreach_mul_([before], 2.0)
    assert before._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.sum().backward()


@pytest.mark.parametrize("policy", KEPT)
def test_a_kept_value_changed_through_data_is_watched_through_the_saved_tensor(policy: Any) -> None:
    x = torch.randn(4, requires_grad=True)
    with actckpt.region(policy):
        base = x * 1.5
        base.data.mul_(1.25)
        y = base.cos()
    expected = -base.detach().clone().sin() * 1.5
    with torch.no_grad():
        base.zero_()
    if policy == "recompute":
        assert_equal(torch.autograd.grad(y.sum(), x)[0], expected)
    else:
        with pytest.raises(actckpt.SavedTensorChangedError, match="expected version"):
            torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("runs_checkpoint", [False, True])
@pytest.mark.parametrize("name", ["tanh", "sin"])
def test_a_kept_product_is_watched_through_what_matmul_gave_on(name: str, runs_checkpoint: bool) -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function() -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.randn(2, 2, 4) @ weight
        return product, getattr(product, name)()

    if runs_checkpoint:
        product, y = actckpt.checkpoint(function, policy=["aten.mm"])
    else:
        with actckpt.region(["aten.mm"]):
            product, y = function()
    torch.autograd.grad(y.sum(), weight, retain_graph=True)
    with torch.no_grad():
        product.zero_()
    with pytest.raises(actckpt.SavedTensorChangedError, match="expected version"):
        torch.autograd.grad(y.sum(), weight)
