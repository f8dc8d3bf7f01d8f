"""Steps that a budget does not plan as a whole say so: no output with a graph, skipped blocks, no backward."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from functools import partial
from typing import Any

import on_device
import pytest
import torch
from budget_programs import Net
from oracle import assert_equal
from peaks import Twins, apply_budget
from residual_mlp import mlps
from torch import Tensor, nn

import actckpt
from actckpt.errors import BlocksError


class Model(nn.Module):
    """Trains as it is told, and returns what it is told."""

    def __init__(self, kind: str = "loss") -> None:
        super().__init__()
        self.kind, self.last = kind, nn.Identity()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        loss = self.last(x.square().mean())
        if self.kind == "own backward":
            loss.backward()
            return loss.detach()
        return types.SimpleNamespace(loss=loss) if self.kind == "object" else loss


def _step(model: Any) -> None:
    found = model(torch.ones(8, 16))
    if model.kind != "own backward":
        (found.loss if model.kind == "object" else found).backward()


def _together(model: Any) -> None:
    for loss in [model(torch.ones(8, 16)) for _ in range(2)]:
        loss.backward()


@pytest.mark.parametrize("kind", ["own backward", "object"])
def test_a_model_whose_step_has_no_end_that_can_be_seen_is_told_once_and_blocks_are_profiled_once(kind: str) -> None:
    twins: Any = Twins(partial(Model, kind), "50%", on_infeasible="warn")
    with pytest.warns(UserWarning, match="no plan for the budget is made for a Model whose blocks ran") as told:
        twins.step(_step, 3)
    assert len(told) == 1
    assert actckpt.report(twins.model).plan is None
    calls: list[object] = []
    twins.model.blocks[1][1].register_forward_hook(lambda *_: calls.append(1))
    twins.step(_step)
    assert len(calls) <= 2  # the forward, and its rerun: no profile


def test_a_step_whose_end_is_seen_has_a_plan_also_after_one_whose_end_is_not() -> None:
    twins: Any = Twins(partial(Model, "object"), "90%", race=True)
    with pytest.warns(UserWarning, match="until it returns one"):
        twins.model(torch.ones(8, 16))  # a prediction, with gradients on
    twins.model.kind = twins.plain.kind = "loss"
    twins.step(_step, 4)
    assert twins.plan is not None


def test_a_forward_that_ends_before_it_began_does_not_count() -> None:
    """Another hook fails, or the model is called where a budget has no meaning: what is alive is counted right."""

    def refuse(module: nn.Module, args: Any) -> None:
        if args[0].shape[0] == 7:
            raise ValueError("seven rows")

    twins, other = Twins(Model), Twins(Model)
    twins.model.register_forward_pre_hook(refuse)
    for each in (twins, other):
        apply_budget(each.model, "90%")
        each.step(_step, 3)
    for _ in range(2):
        with pytest.raises(ValueError, match="seven rows"):
            twins.model(torch.ones(7, 16))
        with pytest.raises(BlocksError):
            actckpt.checkpoint(twins.model, torch.ones(8, 16))
        for each in (twins, other):
            each.step(_together)
    for each in (twins, other):
        each.step(_step)
    assert twins.plan.budget_bytes == other.plan.budget_bytes


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["blocks.0", "blocks.2.1", "last"])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_forward_that_raises_is_alive_no_more_and_leaves_no_mode(
    num_steps: int, where: str, error: type[BaseException]
) -> None:
    """Hooks do not hear of interrupts, after which a notebook goes on: modes end with the next forward."""

    def fail(*_: object) -> None:
        raise error

    def fails(x: Tensor) -> None:
        hook = twins.model.get_submodule(where).register_forward_pre_hook(fail)
        with pytest.raises(error):
            twins.model(x)
        hook.remove()

    def has_mode() -> bool:
        return torch.utils._python_dispatch._get_current_dispatch_mode() is not None

    twins, other = (Twins(Model, "90%", blocks="blocks.*") for _ in range(2))
    for _ in range(num_steps):
        twins.step(_step)
    for _ in range(3):
        fails(torch.ones(8, 16))
        assert error is KeyboardInterrupt or not has_mode()
    twins.step(_step, 3)
    other.step(_step, 3)
    assert twins.plan.budget_bytes == other.plan.budget_bytes, "it counts as one that is alive"
    fails(torch.ones(4, 16))
    actckpt.remove(twins.model)
    assert not has_mode()


@pytest.mark.parametrize("other_rows", [4, 8])
def test_a_model_that_calls_itself_trains_like_plain(other_rows: int) -> None:
    class Recursive(Model):
        def forward(self, x: Tensor, inner: bool = True) -> Any:
            loss = super().forward(x)
            return loss + self(x[:other_rows] * 2, False) if inner else loss

    Twins(Recursive, "90%", blocks="blocks.*", on_infeasible="warn").step(_step, 5)


def test_some_blocks_of_a_plan_cannot_be_removed_alone() -> None:
    model = Model()
    names = actckpt.apply(model, activation_budget="90%")
    part = model.get_submodule(names[0])
    with pytest.raises(BlocksError, match=r"remove: this \w+ is a part of a Model with a budget, whose plan is"):
        actckpt.remove(part)
    for _ in range(3):  # gradients exist from the second one on
        _step(model)
    assert actckpt.report(model).plan is not None
    del model.blocks[-1]  # what is no part of the model any more is not waited for
    assert actckpt.remove(model) == names[:-1]


@pytest.mark.parametrize("budget", ["activation_budget", "budget"])
def test_parameters_that_a_step_computes_have_gradients_without_warnings(budget: str) -> None:
    """As in training through an update: during the forward, the parameters of the model are no leaves."""
    twins = Twins(Model)
    actckpt.apply(twins.model, **{budget: "1GiB"}, race=False)

    def step(model: nn.Module) -> None:
        updated = {name: parameter * 0.9 for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, updated, (torch.ones(8, 16),)).backward()

    twins.step(step, 4)
    assert twins.plan is not None


@pytest.mark.parametrize("clears", [False, True])
def test_casts_that_autocast_releases_inside_of_a_block_stop_no_plan(clears: bool) -> None:
    twins: Any = Twins(Model, "100%")
    if clears:
        twins.model.blocks[1].register_forward_hook(lambda *_: torch.clear_autocast_cache())
    torch.set_autocast_enabled(on_device.device_type, True)
    try:
        for _ in range(3):
            twins.step(_step)
            torch.clear_autocast_cache()
    finally:
        torch.set_autocast_enabled(on_device.device_type, False)
    assert twins.plan is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_forward_inside_of_a_transform_is_no_step(at: int) -> None:
    twins = Twins(Model, "75%", on_infeasible="warn")
    x, tangent = torch.randn(2, 4, 16)
    for number in range(4):
        if number == at:
            found = []
            for model in (twins.plain, twins.model):
                torch.manual_seed(2)
                found.append(list(torch.func.jvp(model, (x,), (tangent,))))
            assert_equal(*found)
        twins.step(_step)
    assert twins.plan is not None


_MOST_DROPPED = 16


def _model(budget: str = "60%") -> nn.Sequential:
    model = mlps(3, 8)
    actckpt.apply(model, activation_budget=budget, race=False)
    return model


def _x() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8)


def _told(found: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [each for each in found if "no backward reached" in str(each.message)]


def test_evaluation_without_no_grad_is_told_once_at_the_line_that_calls() -> None:
    model = _model()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(_MOST_DROPPED):
            model(_x()).sum()
        assert not _told(found)
        for _ in range(2 * _MOST_DROPPED):
            model(_x()).sum()
    (told,) = _told(found)
    assert str(told.message).startswith(f"apply: {_MOST_DROPPED} forwards in a row of a Sequential with a budget ran")
    assert "torch.no_grad()" in str(told.message) and told.filename == __file__


@pytest.mark.parametrize("num", [_MOST_DROPPED - 1, _MOST_DROPPED + 1])
def test_it_is_told_in_training_as_well_where_no_backward_came_in_between(num: int) -> None:
    model = _model()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(_x()).sum().backward()
            for size in range(num):
                model.eval()
                model(_x()[: size % 3 + 1]).sum()
            model.train()
    assert len(_told(found)) == (num > _MOST_DROPPED)


def test_a_backward_that_does_not_come_to_what_the_model_returned_is_not_denied() -> None:
    model, seen = _model(), list[Tensor]()
    model[1].register_forward_hook(lambda _, __, result: seen.append(result))
    with pytest.warns(UserWarning, match="no backward reached what they returned"):
        for _ in range(_MOST_DROPPED + 1):
            model(_x())
            seen.pop().sum().backward()


def test_losses_of_micro_batches_that_wait_for_one_backward_are_not_told() -> None:
    model = _model("100%")
    for _ in range(2):
        torch.stack([model(_x()).sum() for _ in range(3 * _MOST_DROPPED)]).sum().backward()
        for _ in range(2 * _MOST_DROPPED):
            with torch.no_grad():
                model(_x())


def test_forwards_are_not_held_for_it() -> None:
    model = _model()
    for _ in range(3):
        gone = weakref.ref(model(_x()))
        gc.collect()
        assert gone() is None
    gone = weakref.ref(model)  # type: ignore[assignment]
    del model
    gc.collect()
    assert gone() is None


def _with_frozen_backbone(net: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(net.is_trained):
        for block in net.blocks:
            x = block(x)
    result: Tensor = net.head(x)
    return result


@pytest.mark.parametrize("trained", [[False] * 3 + [True] * 3, [False, True] * 4], ids=["later", "often"])
def test_blocks_that_run_with_gradients_later_or_in_every_other_step_get_a_plan(trained: list[bool]) -> None:
    """A backbone that is frozen at first: nothing can be measured, which a warning says."""
    model: Any = Net(_with_frozen_backbone, mlps(3, 8), head=nn.Linear(8, 2))
    actckpt.apply(model, blocks="blocks.*", activation_budget="100%", race=False)
    with pytest.warns(UserWarning, match="stay checkpointed until one runs with gradients") as found:
        for model.is_trained in trained:
            model(_x()).sum().backward()
    assert len(found) == 1 and actckpt.report(model).plan is not None
