"""Budgets of steps whose backward retains its graph: what blocks keep is there until the last one."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from oracle import assert_equal
from peaks import counted
from residual_mlp import Mlp
from torch import Tensor, nn
from torch.nn import functional

import actckpt


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(128) for _ in range(8)), nn.Linear(128, 2))


def _step(model: nn.Module, kind: str, *, total: bool = False) -> tuple[list[Tensor], int]:
    """Return gradients, and the peak."""
    x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    with counted(model, total=total, held=list(model.parameters())) as count:
        found = model(x).square()
        if kind == "again":
            loss = found.mean()
            loss.backward(retain_graph=True)
            loss.backward()
        elif kind == "two losses":
            found[:, 0].mean().backward(retain_graph=True)
            found[:, 1].mean().backward()
        else:
            found.mean().backward()
    return [p.grad.clone() for p in model.parameters()], count.peak_bytes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["again", "two losses"])
@pytest.mark.parametrize("keyword", ["budget", "activation_budget"])
def test_steps_that_retain_their_graph_from_the_first_one_on_stay_in_the_budget(kind: str, keyword: str) -> None:
    total = keyword == "budget"
    expected, plain_bytes = _step(_model(), kind, total=total)
    model = _model()
    actckpt.apply(model, **{keyword: 2**20 if total else 1}, on_infeasible="raise")
    _step(model, kind)
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as raised:
        _step(model, kind)
    smallest_bytes = raised.value.smallest_bytes
    assert smallest_bytes is not None and smallest_bytes < 0.5 * plain_bytes
    for share in (0.0, 0.4):
        budget = int(smallest_bytes + share * (plain_bytes - smallest_bytes))
        model = _model()
        actckpt.apply(model, **{keyword: budget}, race=False, on_infeasible="raise")
        for step in range(4):
            found, peak_bytes = _step(model, kind, total=total)
            assert_equal(found, expected)
            assert peak_bytes <= budget or not step
        plan = actckpt.report(model).plan
        assert plan is not None and plan.overhead_seconds > 0.0


def test_a_backward_that_retains_its_graph_for_the_first_time_is_planned_for() -> None:
    plain_bytes = _step(_model(), "once")[1]
    budget = plain_bytes * 6 // 10
    model = _model()
    actckpt.apply(model, activation_budget=budget, race=False, on_infeasible="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            _step(model, "once")
    before = actckpt.report(model).plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a device warns
        peaks = [_step(model, "again")[1] for _ in range(4)]
    assert max(peaks[1:]) <= budget < peaks[0]
    assert_equal(_step(model, "once")[0], _step(_model(), "once")[0])
    after = actckpt.report(model).plan
    assert before is not None and after is not None and after.overhead_seconds > before.overhead_seconds


def test_a_graph_that_the_program_goes_on_to_hold_counts_in_the_next_step() -> None:
    """It is retained, and its loss lives while the next forward runs."""
    plain_bytes = _step(_model(), "again")[1]
    x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0))
    model = _model()
    actckpt.apply(model, activation_budget=plain_bytes, race=False, on_infeasible="raise")
    for _ in range(4):
        with counted(model, total=False) as count:
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            held = [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
            again = model(x).square().mean()
            again.backward(retain_graph=True)
        assert_equal([parameter.grad for parameter in model.parameters()], held)
        del loss, again, held
        model.zero_grad()
    assert count.peak_bytes <= plain_bytes


def test_a_graph_that_a_last_backward_released_counts_no_more() -> None:
    plain_bytes = _step(_model(), "again")[1]
    x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0))
    model = _model()
    actckpt.apply(model, activation_budget=plain_bytes * 5 // 4, race=False, on_infeasible="raise")
    for _ in range(4):
        loss = model(x).square().mean()  # that of the step before lives until now
        loss.backward(retain_graph=True)
        loss.backward()
    plan = actckpt.report(model).plan
    assert plan is not None and plan.overhead_seconds == 0.0


def test_a_budget_that_is_too_small_for_a_retained_graph_is_told_in_training() -> None:
    model = _model()
    actckpt.apply(model, activation_budget=1, race=False, on_infeasible="raise")
    _step(model, "once")
    with pytest.raises(actckpt.errors.PlanInfeasibleError) as raised:
        _step(model, "once")
    assert raised.value.smallest_bytes is not None
    model = _model()
    actckpt.apply(model, activation_budget=int(raised.value.smallest_bytes), race=False, on_infeasible="raise")
    for _ in range(2):
        _step(model, "once")
    with pytest.warns(UserWarning, match="From now on the plan runs that needs least"):
        for _ in range(4):
            assert_equal(_step(model, "again")[0], _step(_model(), "again")[0])


@pytest.mark.parametrize("loss", ["cross entropy", "square"])
@pytest.mark.parametrize("share", ["65%", "75%", "85%"])
def test_what_a_loss_outside_of_the_model_saves_stays_too(loss: str, share: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Mlp(128) for _ in range(4)), nn.LayerNorm(128), nn.Linear(128, 96))
    x, labels = torch.randn(256, 128), torch.randint(96, (256,))

    def step(model: nn.Module) -> tuple[list[Tensor], int]:
        model.zero_grad()
        with counted(model, total=False, held=list(model.parameters())) as count:
            found = model(x)
            value = functional.cross_entropy(found, labels) if loss == "cross entropy" else found.square().mean()
            value.backward(retain_graph=True)
            value.backward()
        return [p.grad.clone() for p in model.parameters()], count.peak_bytes

    model = copy.deepcopy(plain)
    actckpt.apply(model, blocks=Mlp, activation_budget=share, race=False, on_infeasible="raise")
    expected, plain_bytes = step(plain)
    for _ in range(4):
        found, peak_bytes = step(model)
        assert_equal(found, expected)
    plan = actckpt.report(model).plan
    assert plan is not None
    assert peak_bytes <= plan.budget_bytes <= 1.03 * plain_bytes * int(share[:-1]) / 100
    assert plan.budget_bytes >= 0.9 * plain_bytes * int(share[:-1]) / 100
