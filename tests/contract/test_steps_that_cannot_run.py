"""A step that `plan`, `compare` or `estimate` cannot run is one clear error that says why and what to pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import on_device
import pytest
import torch
from torch import Tensor, nn

import actckpt

Call = Callable[[Any], object]


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)))


def _x() -> Tensor:
    return torch.linspace(-1, 1, 4 * 16).view(4, 16)


_CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "plan": lambda model, step: actckpt.plan(step, model=model, activation_budget="100%", race=False),
    "compare": lambda model, step: actckpt.compare(step, model=model, policies={}, rounds=1),
    "estimate": lambda model, step: actckpt.estimate(step, model=model, policies={}),
}


@pytest.fixture(params=_CALLS)
def who(request: pytest.FixtureRequest) -> str:
    if request.param == "estimate" and on_device.device_type != "cpu":
        pytest.skip("what is estimated is what a CPU would do")
    return str(request.param)


def _generator() -> Iterator[int]:
    yield 1


async def _coroutine() -> None: ...


@pytest.mark.parametrize(
    ("step", "kind", "message"),
    [
        (torch.ones(2), TypeError, r"the step is a tensor of shape \(2,\), not a function\. .*uncalled\.$"),
        (None, TypeError, r"the step is None, not a function"),
        (lambda batch: batch, ValueError, r"takes arguments \(missing .*: 'batch'\)\. .*lambda: model"),
        (nn.Linear(2, 2), ValueError, r"the step is the module Linear, which takes arguments"),
        (_generator, ValueError, "does not run when it is called"),
        (_coroutine, ValueError, "does not run when it is called"),
    ],
    ids=["loss", "None", "arguments", "module", "generator", "coroutine"],
)
def test_what_cannot_be_called_is_refused(who: str, step: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=rf"^{who}: .*{message}") as raised:
        _CALLS[who](_model(), step)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_where_gradients_are_off_that_is_named(who: str, off: Any) -> None:
    model = _model()
    with off(), pytest.raises(ValueError, match=rf"^{who}: the step cannot run backward\. .*torch\.no_grad"):
        _CALLS[who](model, lambda: model(_x()).sum().backward())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_turns_gradients_on_runs_where_they_are_off(who: str) -> None:
    model, num_runs = _model(), 0

    @torch.enable_grad()
    def step() -> None:
        nonlocal num_runs
        num_runs += 1
        model(_x()).sum().backward()

    with torch.no_grad():
        _CALLS[who](model, step)
        assert not torch.is_grad_enabled()
    assert num_runs > 1


def test_a_step_that_returns_its_loss_without_backward_is_told_to_run_it(who: str) -> None:
    model = _model()

    def step() -> Tensor:
        return model(_x()).sum()

    with pytest.raises(ValueError, match=r"It returned a tensor: run backward inside of the step"):
        _CALLS[who](model, step)

    def with_backward() -> Tensor:
        loss: Tensor = model(_x()).sum()
        loss.backward()
        return loss

    _CALLS[who](model, with_backward)


def test_a_model_in_which_nothing_is_trained_is_named(who: str) -> None:
    model = _model().requires_grad_(False)
    x = _x().requires_grad_()
    with pytest.raises(ValueError, match="None of its parameters requires gradients"):
        _CALLS[who](model, lambda: model(x.detach()).sum())


def test_what_a_step_returns_is_no_reason_where_it_ran_backward() -> None:
    model = _model()

    def step() -> Tensor:
        loss: Tensor = (model(_x()) + model(_x())).sum()
        loss.backward()
        return loss

    with pytest.raises(actckpt.errors.BlocksError, match="ran 2 times in the step") as raised:
        actckpt.plan(step, model=model, activation_budget="100%", race=False)
    assert "It returned" not in str(raised.value)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_that_runs_without_gradients_is_told_so(off: Any) -> None:
    model = _model()

    def step() -> None:
        with off():
            model(_x()).sum()

    message = (
        r"^plan: 3 of 3 blocks ran without gradients in the step \(torch\.no_grad.*\): 0-2\. Pass a step that trains"
    )
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        actckpt.plan(step, model=model, activation_budget="100%", race=False)


class _Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_model())

    def forward(self, x: Tensor) -> Tensor:
        for part in self.layers[0]:  # type: ignore[attr-defined]
            x = part(x)
        return self.layers[2](x)


def test_blocks_that_no_step_calls_are_named_with_what_to_pass() -> None:
    model, other = _Skips(), _model()
    plan: Any = lambda step: actckpt.plan(step, model=model, activation_budget="100%", race=False)  # noqa: E731
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"2 of 3 blocks were not called .* the _Skips was: layers\.0-1\."
    ):
        plan(lambda: model(_x()).sum().backward())
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"called neither the _Skips that was given .* any of its 3 blocks\."
    ):
        plan(lambda: other(_x()).sum().backward())
    with pytest.raises(
        actckpt.errors.BlocksError, match=r"2 of 3 blocks were not .* and neither was the _Skips .*0-1\."
    ):
        plan(lambda: model.layers[2](_x()).sum().backward())


@pytest.mark.parametrize("model", [None, [_model()]])
def test_what_is_no_module_is_refused(who: str, model: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{who}: model is a \w+, not a module\."):
        _CALLS[who](model, lambda: None)


@pytest.mark.parametrize("rounds", [0, -1, 2.5, "3"])
def test_rounds_are_a_whole_number(rounds: Any) -> None:
    with pytest.raises(ValueError, match=r"^compare: rounds=.* Pass a whole number from 1 on"):
        actckpt.compare(lambda: None, model=_model(), rounds=rounds)
