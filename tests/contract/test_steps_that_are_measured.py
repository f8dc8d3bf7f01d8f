"""Steps of `plan`, `compare` and `estimate`: what cannot run is one clear error, and what their optimizers are."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import on_device
import pytest
import torch
from on_device import random_states
from oracle import assert_equal, gradients
from peaks import counted
from residual_mlp import Mlp, mlps
from torch import Tensor, nn

import actckpt


def _model() -> nn.Sequential:
    return mlps(3, 16)


def _x() -> Tensor:
    return torch.linspace(-1, 1, 4 * 16).view(4, 16)


def _plan(model: nn.Module, step: Any, **options: Any) -> object:
    return actckpt.plan(step, model=model, **{"activation_budget": "100%", "race": False, **options})


def _compare(model: nn.Module, step: Any, **options: Any) -> Any:
    return actckpt.compare(step, model=model, rounds=1, **{"policies": {}, **options})


def _estimate(model: nn.Module, step: Any, **options: Any) -> Any:
    return actckpt.estimate(step, model=model, **{"policies": {}, "target": "h100", **options})


def _apply(model: nn.Module, step: Any, **options: Any) -> object:
    return actckpt.apply(model, budget="1GiB", **options)


_CALLS: dict[str, Callable[..., Any]] = {"plan": _plan, "compare": _compare, "estimate": _estimate}


@pytest.fixture(params=_CALLS)
def who(request: pytest.FixtureRequest) -> str:
    if request.param == "estimate" and on_device.device_type != "cpu":
        pytest.skip("estimate replaces tensors of the CPU by fake ones, and this step makes tensors of the device")
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


_OFF = pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])


@_OFF
def test_where_gradients_are_off_that_is_named(who: str, off: Any) -> None:
    model = _model()
    with off(), pytest.raises(ValueError, match=rf"^{who}: the step cannot run backward\. .*torch\.no_grad"):
        _CALLS[who](model, lambda: model(_x()).sum().backward())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_turns_gradients_on_runs_where_they_are_off_and_may_return_its_loss(who: str) -> None:
    model, num_runs = _model(), 0

    @torch.enable_grad()
    def step() -> Tensor:
        nonlocal num_runs
        num_runs += 1
        loss: Tensor = model(_x()).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        _CALLS[who](model, step)
        assert not torch.is_grad_enabled()
    assert num_runs > 1


def test_a_step_that_returns_its_loss_without_backward_is_told_to_run_it(who: str) -> None:
    model = _model()
    with pytest.raises(ValueError, match=r"It returned a tensor: run backward inside of the step"):
        _CALLS[who](model, lambda: model(_x()).sum())


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
        _plan(model, step)
    assert "It returned" not in str(raised.value)


@_OFF
def test_a_step_that_runs_without_gradients_is_told_so(off: Any) -> None:
    model = _model()

    def step() -> None:
        with off():
            model(_x()).sum()

    message = (
        r"^plan: 3 of 3 blocks ran without gradients in the step \(torch\.no_grad.*\): 0-2\. Pass a step that trains"
    )
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        _plan(model, step)


class _Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_model())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[0].down(self.layers[0].up(x)))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("called", "message"),
    [
        (lambda model: model, r"2 of 3 blocks were not called .* the _Skips was: layers\.0-1\."),
        (lambda model: _model(), r"called neither the _Skips that was given .* any of its 3 blocks\."),
        (lambda model: model.layers[2], r"2 of 3 blocks were not .* and neither was the _Skips .*0-1\."),
    ],
)
def test_blocks_that_no_step_calls_are_named_with_what_to_pass(called: Any, message: str) -> None:
    model = _Skips()
    part = called(model)
    with pytest.raises(actckpt.errors.BlocksError, match=message):
        _CALLS["plan"](model, lambda: part(_x()).sum().backward())


@pytest.mark.parametrize("model", [None, [_model()]])
def test_what_is_no_module_is_refused(who: str, model: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{who}: model is a \w+, not a module\."):
        _CALLS[who](model, lambda: None)


@pytest.mark.parametrize("rounds", [0, -1, 2.5, "3"])
def test_rounds_are_a_whole_number(rounds: Any) -> None:
    with pytest.raises(ValueError, match=r"^compare: rounds=.* Pass a whole number from 1 on"):
        actckpt.compare(lambda: None, model=_model(), rounds=rounds)


@pytest.mark.parametrize("measure", [_compare, _estimate])
def test_a_budget_that_nothing_fits_into_is_an_error_with_one_that_does(measure: Callable[..., Any]) -> None:
    model, x = mlps(6, 64), torch.randn(256, 64)
    step = lambda: model(x).square().mean().backward()  # noqa: E731
    where = rf"^{measure.__name__.strip('_')}: policies\['tiny'\]: No plan "
    with pytest.raises(actckpt.errors.PlanInfeasibleError, match=where) as raised:
        measure(model, step, policies={"tiny": {"activation_budget": "1%"}})
    least = raised.value.smallest_bytes
    assert least is not None and str(round(least)) in str(raised.value)
    found = measure(model, step, policies={"least": {"activation_budget": least}})
    assert found["least"].peak_bytes <= least < found["none"].peak_bytes


def test_a_model_that_is_checkpointed_already_is_refused_and_stays_so(who: str) -> None:
    model = _model()
    names = actckpt.apply(model, blocks="1")
    with pytest.raises(actckpt.errors.BlocksError, match=r"checkpointed already"):
        _CALLS[who](model, lambda: model(_x()).sum().backward())
    assert actckpt.remove(model) == names


class Noisy(Mlp):
    """Draws from the default generator and one of its own, and moves buffers."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.norm, self.drop = nn.BatchNorm1d(dim), nn.Dropout(0.1)
        self.generators = [torch.Generator().manual_seed(1)]

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generators[0])
        return super().forward(self.drop(self.norm(x))) * noise


class Wrapper:
    """Wraps an optimizer as accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.step = optimizer, lambda: optimizer.step()

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


class Training:
    """A model with one optimizer for matrices and one for the rest, and a step that runs both."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*(Noisy(16) for _ in range(4)))
        self.x = torch.randn(8, 16)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() != 2]
        self.optimizers: list[Any] = [torch.optim.SGD(matrices, 0.01, momentum=0.9), torch.optim.AdamW(others)]

    def step(self) -> None:
        random.random(), numpy.random.rand()
        self.model.zero_grad()
        self.model(self.x).square().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def measured(self, measure: Callable[..., Any], optimizer: Any, **options: Any) -> Any:
        """Measure the step, under a budget where there is one."""
        options |= {"activation_budget": "60%"} if measure is _plan else {}
        return measure(self.model, options.pop("step", self.step), optimizer=optimizer, **options)

    def state(self) -> list[Any]:
        """What a step may change, as copies."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *gradients(self.model)]
        states = [getattr(each, "optimizer", each).state_dict() for each in self.optimizers]
        drawn = [block.generators[0].get_state() for block in self.model]
        libraries = random.getstate(), [str(part) for part in numpy.random.get_state()]
        return copy.deepcopy([[*map(_value, tensors)], states, drawn, random_states(), libraries])


def _value(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 4])
def test_everything_stays_as_it_was_also_after_a_step_that_raises(
    who: str, fails_at: int, has_gradients: bool, is_wrapped: bool
) -> None:
    training, calls = Training(), []
    if is_wrapped and who != "estimate":
        training.optimizers = [Wrapper(each) for each in training.optimizers]
    training.step()
    if not has_gradients:
        training.model.zero_grad()
    before, objects = training.state(), gradients(training.model)

    def step() -> None:
        training.step()
        calls.append(None)
        if len(calls) == fails_at:
            raise OSError("no more data")

    options: dict[str, Any] = {"race": fails_at > 0} if who == "plan" else {"policies": None}
    with pytest.raises(OSError, match="no more data") if fails_at else contextlib.nullcontext():
        found = training.measured(_CALLS[who], training.optimizers, step=step, **options)
        assert "DIFFER" not in str(found)
    assert_equal(training.state(), before)
    assert all(now is then for now, then in zip(gradients(training.model), objects, strict=True))
    with pytest.raises(actckpt.errors.BlocksError, match="none of"):
        actckpt.remove(training.model)


@pytest.mark.parametrize("measure", [_plan, _compare, _estimate])
def test_one_of_several_that_was_left_out_is_named(measure: Callable[..., Any]) -> None:
    training = Training()
    training.step()
    before = training.state()
    with pytest.raises(ValueError, match=r"an optimizer .*AdamW.* that was not given|not given \(AdamW\)"):
        training.measured(measure, training.optimizers[0])
    assert_equal(training.state(), before)


@pytest.mark.parametrize("measure", [_plan, _compare, _estimate, _apply])
@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        (lambda _: "adam", TypeError, r"optimizer is a str\. Pass the torch\.optim\.Optimizer"),
        (lambda _: torch.optim.AdamW, TypeError, r"optimizer is the class AdamW"),
        (lambda training: [training.optimizers[0], 3], TypeError, r"optimizer is a int"),
    ],
)
def test_what_is_no_optimizer_is_refused(
    measure: Callable[..., Any], optimizer: Callable[[Training], Any], error: type, message: str
) -> None:
    training = Training()
    with pytest.raises(error, match=message):
        training.measured(measure, optimizer(training))


def test_budgets_count_the_state_of_all_optimizers() -> None:
    if on_device.device_type != "cpu":
        pytest.skip("everything that is allocated counts there")
    peaks = []
    for num in (0, 1, 2):
        training = Training()
        training.step()
        actckpt.apply(training.model, budget="1GiB", optimizer=training.optimizers[:num], race=False)
        for _ in range(2):
            training.step()
        peaks.append(actckpt.report(training.model).plan.peak_bytes)
    states = [
        sum(value.nbytes for state in each.state.values() for value in state.values()) for each in training.optimizers
    ]
    assert peaks[1] - peaks[0] == states[0] and peaks[2] - peaks[1] == states[1]


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_a_plan_counts_the_state_that_its_optimizers_make_once(is_in_backward: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))
    model, x = model.to(on_device.device_type), torch.randn(32, 64, device=on_device.device_type)
    parameters = list(model.parameters())
    optimizers = [torch.optim.AdamW([parameter]) for parameter in parameters]
    states: list[Tensor] = [parameter.detach() for parameter in parameters]
    peaks: list[int] = []

    def update(index: int) -> None:
        optimizers[index].step()
        parameters[index].grad = None

    for index, parameter in enumerate(parameters if is_in_backward else ()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: update(index))

    def step() -> None:
        with counted(model, total=True, held=states) as found:
            model(x).square().sum().backward()
        peaks.append(found.peak_bytes)
        for index in range(0 if is_in_backward else len(parameters)):
            update(index)

    plan = actckpt.plan(step, model=model, optimizer=optimizers, budget="1GiB", race=False)
    assert not any(each.state for each in optimizers)
    step()
    states += [value for each in optimizers for state in each.state.values() for value in state.values()]
    step()
    assert plan.peak_bytes == pytest.approx(peaks[-1], rel=0.01)


def test_an_update_without_an_optimizer_is_named() -> None:
    training = Training()

    def step() -> None:
        training.model.zero_grad()
        training.model(training.x).square().sum().backward()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter -= 0.01 * parameter.grad

    before = training.state()
    with pytest.raises(ValueError, match=r"plan: the step changed '0.up.weight', and no optimizer was given"):
        _plan(training.model, step)
    assert_equal(training.state(), before)


@pytest.mark.parametrize("measure", [_plan, _compare, _apply])
def test_an_optimizer_that_trains_nothing_of_the_model_is_told(measure: Callable[..., Any]) -> None:
    """As one of master copies, which is right, or one of another model, which is not."""
    training = Training()
    copies = [parameter.detach().clone().requires_grad_() for parameter in training.model.parameters()]
    training.optimizers = []
    with pytest.warns(UserWarning, match="optimizer SGD trains no parameter of this Sequential"):
        training.measured(measure, torch.optim.SGD(copies, 0.1))


@pytest.mark.parametrize("given", [slice(0, 1), slice(0, 2)])
@pytest.mark.parametrize("measure", [_plan, _compare])
def test_a_step_may_run_the_optimizer_of_another_model(measure: Callable[..., Any], given: slice) -> None:
    """As that of a discriminator, given or not."""
    training = Training()
    other = nn.Linear(16, 1)
    training.optimizers = [torch.optim.SGD(training.model.parameters(), 0.01), torch.optim.SGD(other.parameters(), 0.1)]
    before = training.state()
    other.weight.grad = torch.ones_like(other.weight)
    training.measured(measure, training.optimizers[given])
    assert_equal(training.state(), before)
