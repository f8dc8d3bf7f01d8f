"""What policies are asked, what their answers do, and what happens to answers that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import assert_equal, leaf, mlp

import actckpt
from actckpt import Action

aten = torch.ops.aten


#: Checksums are operators too, and these tests count operators.
pytestmark = pytest.mark.usefixtures("no_audit")


def test_a_value_policy_is_asked_once_per_saved_value_with_what_it_is() -> None:
    seen = []

    def policy(info: actckpt.SavedTensorInfo) -> Action:
        seen.append(info)
        return Action.RECOMPUTE

    x = torch.randn(3, 4)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    with actckpt.region(policy):
        y = (x @ weight).sin()
        (y * y).sum()
    by_op = {info.op: info for info in seen}
    assert len(seen) == len(by_op) == 3
    given = by_op[None]
    assert (given.is_input, given.replayable, given.shape, given.nbytes) == (True, False, (3, 4), 48)
    product = by_op[aten.mm.default]
    assert (product.is_input, product.replayable, product.is_parameter) == (False, True, False)
    assert by_op[aten.sin.default].dtype is torch.float32


def test_a_value_policy_is_told_the_module() -> None:
    seen = []

    def policy(info: actckpt.SavedTensorInfo) -> Action:
        seen.append((info.op, info.module))
        return Action.RECOMPUTE

    model = mlp(4, depth=2)
    with actckpt.region(policy):
        model(torch.randn(2, 4)).sum()
    modules = [module for op, module in seen if op is aten.addmm.default]
    assert len(modules) == 2
    assert all(module is not None for module in modules), modules


def test_an_open_region_cannot_be_entered_again() -> None:
    region = actckpt.region()
    with region, pytest.raises(RuntimeError, match="open already"), region:
        pass
    with region:
        y = leaf(3).sin()
    y.sum().backward()


def test_a_region_without_parentheses_says_so_when_its_function_is_called() -> None:
    @actckpt.region
    def block(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @actckpt.region
    def step() -> None:
        raise AssertionError

    for call in (lambda: block(leaf(2)), lambda: block(x=leaf(2)), lambda: block(leaf(2), 1), lambda: step()):
        with pytest.raises(TypeError, match=r"actckpt\.region\(.*(block|step)\).* @actckpt\.region\(\)"):
            call()


def test_a_policy_function_still_decorates() -> None:
    x = leaf(3)
    actckpt.region(lambda info: Action.RECOMPUTE)(torch.sin)(x).sum().backward()
    assert_equal(x.grad, x.detach().cos())


@pytest.mark.parametrize(
    ("policy", "note"),
    [
        (
            "keep",
            "Not recorded: policy 'keep' leaves all values to autograd. region('keep', record=True) records them.",
        ),
        ("offload", "Not recorded: policy 'offload' moves all values. actckpt.stats() counts them."),
    ],
)
def test_a_report_of_a_region_that_records_nothing_says_so(policy: str, note: str) -> None:
    x = leaf(3)
    with actckpt.region(policy) as region:
        x.sin()
    report = region.report()
    assert str(report) == note
    assert report.rows == ()
    assert report.as_dict()["note"] == str(report)
    assert region.report(explain=x) == str(report)


def test_a_report_of_a_region_that_was_not_opened_says_so() -> None:
    region = actckpt.region()
    assert "not opened yet" in str(region.report())
    with torch.no_grad(), region:
        leaf(3).sin()
    assert "grad mode was off" in str(region.report())
    with region:
        leaf(3).sin()
    assert region.report().note == ""
    assert region.report().rows


def test_a_report_of_a_region_inside_another_one_points_outside() -> None:
    with actckpt.region() as outer, actckpt.region(["aten.sin"]) as inner:
        leaf(3).sin().cos()
    assert "the region around this one" in str(inner.report())
    assert {row.operator for row in outer.report().rows} >= {"aten.sin.default"}


def _conditional(x: torch.Tensor) -> torch.Tensor:
    """Run a higher-order operator whose result is saved."""
    scaled = x * 2
    return torch.cond(scaled.sum() > 0, lambda h: h.exp(), lambda h: h.sin(), (scaled,)).cos()


def _asked_of_cond(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.higher_order.cond


@pytest.mark.skipif(
    torch.__version__ < (2, 10),
    reason="below any dispatch mode, the backward of torch.cond fails in torch 2.9, which does not compile it there",
)
@pytest.mark.filterwarnings("ignore")  # torch compiles the two branches
@pytest.mark.parametrize(
    ("policy", "num_opaque"),
    [
        ([torch.ops.higher_order.cond], 0),
        (actckpt.policies.PerOp({torch.ops.higher_order.cond: "keep"}), 0),
        (_asked_of_cond, 0),
        (lambda info: "keep" if info.op is torch.ops.higher_order.cond else "recompute", 0),
        ([aten.mm], 1),
    ],
    ids=["list", "PerOp", "torch", "values", "another"],
)
def test_what_a_higher_order_operator_makes_is_kept_and_policies_may_name_it(policy: Any, num_opaque: int) -> None:
    x = leaf(64)
    expected = torch.autograd.grad(_conditional(x).sum(), x)
    actckpt.reset_stats()
    with actckpt.region(policy) as region:
        y = _conditional(x)
    assert_equal(torch.autograd.grad(y.sum(), x), expected)
    assert actckpt.stats().kept_opaque == num_opaque
    (row,) = [row for row in region.report().rows if row.operator == "higher_order.cond"]
    assert row.kept_bytes == 256
    assert row.not_replayed == ({"made by a higher-order operator": 1} if num_opaque else {})


def test_a_default_of_per_op_moves_values_of_any_size_and_no_inputs_also_without_actions() -> None:
    x = leaf(8, 8)
    expected = torch.autograd.grad((x.exp() * x).sin().sum(), x)
    for action, moved in (("offload", 2 * 256), ("keep", 0), ("recompute", 0)):
        actckpt.reset_stats()
        with actckpt.region(actckpt.policies.PerOp({}, default=action)):
            y = (x.exp() * x).sin()
        assert_equal(torch.autograd.grad(y.sum(), x), expected)
        assert actckpt.stats().offloaded_bytes == moved
