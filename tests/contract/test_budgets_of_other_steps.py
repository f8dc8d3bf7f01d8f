"""Steps that a budget does not plan as a whole say so: no output with a graph, skipped blocks, no backward."""

from __future__ import annotations

import gc
import types
import warnings
import weakref
from typing import Any

import on_device
import pytest
import torch
from oracle import assert_equal, gradients
from peaks import apply_budget, plan_of
from torch import Tensor, nn

import actckpt
from actckpt.errors import BlocksError


class Model(nn.Module):
    """Trains as it is told, and returns what it is told."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        if self.kind == "own backward":
            loss.backward()
            return loss.detach()
        return types.SimpleNamespace(loss=loss) if self.kind == "object" else loss

    def step(self) -> list[Tensor]:
        self.zero_grad()
        torch.manual_seed(1)
        found = self(torch.ones(8, 16))
        if self.kind != "own backward":
            (found.loss if self.kind == "object" else found).backward()
        return [parameter.grad.clone() for parameter in self.parameters()]


@pytest.mark.parametrize("kind", ["own backward", "object"])
def test_a_model_whose_step_has_no_end_that_can_be_seen_is_told_once_and_blocks_are_profiled_once(kind: str) -> None:
    expected = Model(kind).step()
    model = Model(kind)
    actckpt.apply(model, activation_budget="50%")
    with pytest.warns(UserWarning, match="no plan for the budget is made for a Model whose blocks ran") as told:
        for _ in range(3):
            assert_equal(model.step(), expected)
    assert len(told) == 1
    assert actckpt.report(model).plan is None
    calls: list[object] = []
    model.blocks[1][1].register_forward_hook(lambda *_: calls.append(1))
    model.step()
    assert len(calls) <= 2  # the forward, and its rerun: no profile


def test_a_step_whose_end_is_seen_has_a_plan_also_after_one_whose_end_is_not() -> None:
    model = Model("object")
    actckpt.apply(model, activation_budget="90%")
    with pytest.warns(UserWarning, match="until it returns one"):
        model(torch.ones(8, 16))  # a prediction, with gradients on
    model.kind = "loss"
    expected = Model("loss").step()
    for _ in range(4):
        assert_equal(model.step(), expected)
    assert actckpt.report(model).plan is not None


def test_a_forward_that_ends_before_it_began_does_not_count() -> None:
    """Another hook fails, or the model is called where a budget has no meaning: what is alive is counted right."""

    def refuse(module: nn.Module, args: Any) -> None:
        if args[0].shape[0] == 7:
            raise ValueError("seven rows")

    model, plain, other = Model("loss"), Model("loss"), Model("loss")
    model.register_forward_pre_hook(refuse)
    for each in (model, other):
        actckpt.apply(each, activation_budget="90%", race=False)
        for _ in range(3):
            each.step()
    for _ in range(2):
        with pytest.raises(ValueError, match="seven rows"):
            model(torch.ones(7, 16))
        with pytest.raises(BlocksError):
            actckpt.checkpoint(model, torch.ones(8, 16))
        for each in (model, plain, other):
            each.zero_grad()
            torch.manual_seed(1)
            for loss in [each(torch.ones(8, 16)) for _ in range(2)]:
                loss.backward()
        assert_equal(gradients(model), gradients(plain))
    assert_equal(model.step(), plain.step())
    other.step()
    assert plan_of(model).budget_bytes == plan_of(other).budget_bytes


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_forward_that_is_interrupted_is_alive_no_more(num_steps: int) -> None:
    """Interrupts are no exceptions that hooks hear of; a notebook goes on after them."""

    class Interrupted(Model):
        is_interrupted = False

        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            if self.is_interrupted:
                raise KeyboardInterrupt
            return found

    model, other, plain = Interrupted("loss"), Model("loss"), Model("loss")
    for each in (model, other):
        apply_budget(each, "90%", blocks="blocks.*")
    for _ in range(num_steps):
        model.step()
    for model.is_interrupted in (True, True, True, False, False):
        if model.is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                model.step()
        else:
            assert_equal(model.step(), plain.step())
    model.step()
    for _ in range(3):
        other.step()
    assert plan_of(model).budget_bytes == plan_of(other).budget_bytes


@pytest.mark.parametrize("other_rows", [4, 8])
def test_a_model_that_calls_itself_trains_like_plain(other_rows: int) -> None:
    class Recursive(Model):
        def forward(self, x: Tensor, inner: bool = True) -> Any:
            loss = super().forward(x)
            return loss + self(x[:other_rows] * 2, False) if inner else loss

    model, plain = Recursive("loss"), Recursive("loss")
    actckpt.apply(model, blocks="blocks.*", activation_budget="90%", race=False)
    for _ in range(5):
        assert_equal(model.step(), plain.step())


def test_some_blocks_of_a_plan_cannot_be_removed_alone() -> None:
    model = Model("loss")
    names = actckpt.apply(model, activation_budget="90%")
    part = model.get_submodule(names[0])
    with pytest.raises(BlocksError, match=r"remove: this \w+ is a part of a Model with a budget, whose plan is"):
        actckpt.remove(part)
    for _ in range(3):  # gradients exist from the second one on
        model(torch.ones(8, 16)).backward()
    assert actckpt.report(model).plan is not None
    del model.blocks[-1]  # what is no part of the model any more is not waited for
    assert actckpt.remove(model) == names[:-1]


@pytest.mark.parametrize("budget", ["activation_budget", "budget"])
def test_parameters_that_a_step_computes_have_gradients_without_warnings(budget: str) -> None:
    """As in training through an update: during the forward, the parameters of the model are no leaves."""
    plain, model = Model("loss"), Model("loss")
    actckpt.apply(model, **{budget: "1GiB"}, race=False)
    x = torch.ones(8, 16)
    for number in range(4):
        found = []
        for trained in (plain, model):
            torch.manual_seed(number)
            updated = {name: parameter * 0.9 for name, parameter in trained.named_parameters()}
            loss = torch.func.functional_call(trained, updated, (x,))
            found.append(torch.autograd.grad(loss, list(trained.parameters())))
        assert_equal(list(found[1]), list(found[0]))
    assert actckpt.report(model).plan is not None


@pytest.mark.parametrize("clears", [False, True])
def test_casts_that_autocast_releases_inside_of_a_block_stop_no_plan(clears: bool) -> None:
    plain, model = Model("loss"), Model("loss")
    actckpt.apply(model, activation_budget="100%", race=False)
    if clears:
        model.blocks[1].register_forward_hook(lambda *_: torch.clear_autocast_cache())
    torch.set_autocast_enabled(on_device.device_type, True)
    try:
        for _ in range(3):
            assert_equal(model.step(), plain.step())
            torch.clear_autocast_cache()
    finally:
        torch.set_autocast_enabled(on_device.device_type, False)
    assert actckpt.report(model).plan is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_forward_inside_of_a_transform_is_no_step(at: int) -> None:
    plain, model = Model("loss"), Model("loss")
    actckpt.apply(model, activation_budget="75%", race=False)
    x, tangent = torch.randn(2, 4, 16)
    for number in range(4):
        if number == at:
            torch.manual_seed(2)
            expected = torch.func.jvp(plain, (x,), (tangent,))
            torch.manual_seed(2)
            assert_equal(list(torch.func.jvp(model, (x,), (tangent,))), list(expected))
        assert_equal(model.step(), plain.step())
    assert actckpt.report(model).plan is not None


_MOST_DROPPED = 16


def _model(budget: str = "60%") -> nn.Sequential:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
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


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
        self.head = nn.Linear(8, 2)
        self.is_trained = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.is_trained):
            x = self.blocks(x)
        result: Tensor = self.head(x)
        return result


def test_blocks_that_run_with_gradients_later_get_a_plan() -> None:
    """A backbone that is frozen at first: nothing can be measured, which a warning says."""
    model = _Backbone()
    actckpt.apply(model, blocks="blocks.*", activation_budget="100%", race=False)
    with pytest.warns(UserWarning, match="stay checkpointed until one runs with gradients") as found:
        for _ in range(3):
            model(_x()).sum().backward()
    assert len(found) == 1 and actckpt.report(model).plan is None
    model.is_trained = True
    for _ in range(3):  # the first one shows that blocks run, the second one is measured
        model(_x()).sum().backward()
    assert actckpt.report(model).plan is not None


def test_blocks_that_run_with_gradients_in_every_other_step_get_a_plan() -> None:
    model = _Backbone()
    actckpt.apply(model, blocks="blocks.*", activation_budget="100%", race=False)
    with pytest.warns(UserWarning, match="no plan"):
        for step in range(8):
            model.is_trained = bool(step % 2)
            model(_x()).sum().backward()
    assert actckpt.report(model).plan is not None
