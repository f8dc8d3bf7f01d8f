"""Budgets of models whose parts the program calls, and not the model: methods, or loops over blocks."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import assert_equal
from peaks import counted
from test_budgets import takes_time
from torch import Tensor, nn

import actckpt


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1, self.training)


class Coder(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Autoencoder(nn.Module):
    """As those of Diffusers, with methods that call its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(3), Coder(4)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        return h, h.tanh()

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)[0])


Step = Callable[[Any, Tensor], None]


def _autoencoder(model: Autoencoder, x: Tensor) -> None:
    mean, log_variance = model.encode(x)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    ((model.decode(z) - x).square().mean() + 0.1 * mean.square().mean()).backward()


def _encoder_only(model: Autoencoder, x: Tensor) -> None:
    model.encode(x)[0].square().mean().backward()


def _decoder_twice(model: Autoencoder, x: Tensor) -> None:
    h, _ = model.encode(x)
    (model.decode(h).square().mean() + model.decode(h.sin()).abs().mean()).backward()


def _pair(model: Autoencoder, x: Tensor) -> None:
    (model.encoder(x) - model.encoder(x.sin())).square().mean().backward()


def _blocks_in_a_loop(model: Autoencoder, x: Tensor) -> None:
    for block in (*model.encoder.blocks, *model.decoder.blocks):
        x = block(x)
    x.square().mean().backward()


def _two_backwards(model: Autoencoder, x: Tensor) -> None:
    h, _ = model.encode(x)
    h.square().mean().backward()
    model.decode(h.detach()).square().mean().backward()


def _generator_and_discriminator(model: Autoencoder, x: Tensor) -> None:
    false = model.encoder(x).detach()
    (model.decoder(x.sin()).square().mean() + model.decoder(false).cos().mean()).backward()
    del false
    model.decoder.zero_grad()
    model.decoder(model.encoder(x)).square().mean().backward()


def _parts_then_model(model: Autoencoder, x: Tensor) -> None:
    _autoencoder(model, x)
    model(x).square().mean().backward()


def _parts_and_model(model: Autoencoder, x: Tensor) -> None:
    (model.decode(model.encode(x)[0]).square().mean() + model(x.sin()).square().mean()).backward()


STEPS: list[Step] = [
    _autoencoder,
    _encoder_only,
    _decoder_twice,
    _pair,
    _blocks_in_a_loop,
    _two_backwards,
    _generator_and_discriminator,
    _parts_then_model,
    _parts_and_model,
]
X = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
#: What a step makes before the first forward of a cycle does not count: the inputs of the discriminator.
NOT_COUNTED = {_generator_and_discriminator: 2 * X.nbytes}
pytestmark = pytest.mark.filterwarnings("ignore:apply. 4 of 7 blocks did not run in a step that called backward")


def _model() -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder()


def _steps(model: nn.Module, step: Step, count: int) -> Iterator[list[Tensor | None]]:
    for number in range(count):
        torch.manual_seed(number)
        model.zero_grad()
        step(model, X)
        yield [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def _plain_peak(step: Step) -> int:
    model = _model()
    list(_steps(model, step, 1))
    with counted(model, total=False) as found:
        list(_steps(model, step, 1))
    return found.peak_bytes


def _planned(step: Step = _autoencoder) -> Autoencoder:
    """Return a model that has a plan for steps."""
    model = _model()
    actckpt.apply(model, activation_budget="60%", race=False)
    list(_steps(model, step, 3))
    assert actckpt.report(model).plan is not None
    return model


def _num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("share", [0.6, 0.8])
@pytest.mark.parametrize("step", STEPS)
def test_steps_that_call_parts_fit_the_budget_with_equal_gradients(step: Step, share: float) -> None:
    expected = list(_steps(_model(), step, 6))
    budget = int(share * _plain_peak(step))
    model = _model()
    actckpt.apply(model, activation_budget=budget, race=False, on_infeasible="raise")
    steps = _steps(model, step, 6)
    for number, gradients in enumerate(expected):
        with counted(model, total=False) if number > 2 else contextlib.nullcontext() as found:
            assert_equal(next(steps), gradients)
        assert found is None or found.peak_bytes <= 1.001 * budget + NOT_COUNTED.get(step, 0)
    plan = actckpt.report(model).plan
    assert plan is not None and takes_time(plan, True)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_a_copy_of_a_part_has_no_more_than_that_part_and_trains(copied_by: Callable[[Any], Any]) -> None:
    model = _planned()
    assert len(pickle.dumps(model.encoder)) < len(pickle.dumps(Coder(3))) + 10_000 < len(pickle.dumps(model))
    gc.collect()
    num_models = sum(type(thing) is Autoencoder for thing in gc.get_objects())
    copied, plain = copied_by(model.encoder), Coder(3)
    assert sum(type(thing) is Autoencoder for thing in gc.get_objects()) == num_models
    plain.load_state_dict(copied.state_dict())
    gradients = []
    for part in (copied, plain):
        part.zero_grad()
        torch.manual_seed(5)
        part(X).square().mean().backward()
        gradients.append([parameter.grad for parameter in part.parameters()])
    assert_equal(*gradients)
    assert _num_hooks(copied) == 0
    actckpt.remove(copied)
    list(_steps(model, _autoencoder, 1))  # the model trains on
    assert actckpt.report(model).plan is not None


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_whose_parts_are_called_is_planned_anew(copied_by: Callable[[Any], Any]) -> None:
    model = _planned()
    copied = copied_by(model)
    assert actckpt.report(copied).plan is None
    list(_steps(copied, _autoencoder, 3))
    assert actckpt.report(copied).plan is not None
    for each in (model, copied):
        actckpt.remove(each)
        assert _num_hooks(each) == 0
        assert_equal(list(_steps(each, _autoencoder, 1)), list(_steps(_model(), _autoencoder, 1)))


def test_forwards_of_parts_without_gradients_are_those_of_plain_modules() -> None:
    model, plain = _planned(), _model()
    plan = actckpt.report(model).plan
    results = []
    for each in (model, plain):
        with torch.no_grad():
            torch.manual_seed(5)
            training = each.decode(each.encode(X)[0])
            each.eval()
            results.append([training, each.decode(each.encode(X)[0])])
            each.train()
    assert_equal(*results)
    list(_steps(model, _autoencoder, 1))
    assert actckpt.report(model).plan is plan


def test_a_frozen_part_is_no_forward() -> None:
    model, plain = _model(), _model()
    for each in (model, plain):
        each.encoder.requires_grad_(False)
    actckpt.apply(model, activation_budget="60%", race=False)
    assert_equal(list(_steps(model, _autoencoder, 4)), list(_steps(plain, _autoencoder, 4)))
    plan = actckpt.report(model).plan
    assert plan is not None and set(plan.blocks) == {f"decoder.blocks.{number}" for number in range(4)}


def test_the_cost_of_a_step_is_linear_in_the_number_of_calls() -> None:
    def num_calls(num_blocks: int) -> int:
        model, num = Coder(num_blocks), 0
        actckpt.apply(model, activation_budget="1GiB", race=False)

        def step(model: Coder, x: Tensor) -> None:
            for block in model.blocks:
                x = block(x)
            x.square().mean().backward()

        def note(_: object, event: str, __: object) -> None:
            nonlocal num
            num += event == "call"

        list(_steps(model, step, 5))
        assert actckpt.report(model).plan is not None
        list(_steps(model, step, 1))
        sys.setprofile(note)
        list(_steps(model, step, 1))
        sys.setprofile(None)
        return num

    small, large = num_calls(10), num_calls(40)
    assert large < 4.2 * small


def test_a_part_that_fails_leaves_the_next_steps_within_the_budget() -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    model = _planned()
    with counted(model, total=False) as before:
        list(_steps(model, _autoencoder, 1))
    for part in (model.encoder, model.decoder.blocks[1], model.decoder):
        for register in (part.register_forward_pre_hook, part.register_forward_hook):
            hook = register(fail)
            with pytest.raises(KeyboardInterrupt):
                list(_steps(model, _autoencoder, 1))
            hook.remove()
    with counted(model, total=False) as after:
        list(_steps(model, _autoencoder, 1))
    assert after.peak_bytes == before.peak_bytes


@pytest.mark.parametrize("is_part", [True, False])
def test_threads_that_call_parts_are_refused_while_these_are_measured_and_work_later(is_part: bool) -> None:
    """As threads that call the model."""

    def in_threads(model: Autoencoder) -> list[Exception]:
        raised = list[Exception]()

        def run() -> None:
            try:
                step(model, X)
            except Exception as error:
                raised.append(error)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised

    def step(model: Autoencoder, x: Tensor) -> None:
        y = model.encoder(x) if is_part else model(x)
        y.square().mean().backward()

    model, plain = _model().eval(), _model().eval()
    actckpt.apply(model, activation_budget="60%", race=False)
    list(_steps(model, step, 4))
    for each in (model, plain):
        each.zero_grad()
        for _ in range(5):
            assert not in_threads(each)
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)  # threads add them up in any order
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model().eval()
        actckpt.apply(model, activation_budget="60%", race=False)
        for _ in range(5):
            assert all("in two threads at once" in str(error) for error in in_threads(model))


def test_a_plan_is_made_of_a_step_that_calls_parts() -> None:
    model = _model()
    budget = int(0.7 * _plain_peak(_autoencoder))
    plan = actckpt.plan(lambda: list(_steps(model, _autoencoder, 1)), model=model, activation_budget=budget, race=False)
    assert takes_time(plan, True) and _num_hooks(model) == 0
    actckpt.apply(model, policy=plan)
    with counted(model, total=False) as found:
        actual = list(_steps(model, _autoencoder, 1))
    assert found.peak_bytes <= 1.001 * budget
    assert_equal(actual, list(_steps(_model(), _autoencoder, 1)))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_two_backwards, "runs forward and backward 2 times in turn, expected once"),
        (
            _decoder_twice,
            "'decoder.blocks.0' ran 2 times in the step, and the model, or parts of it, were called 3 times",
        ),
        (_parts_and_model, "'encoder.blocks.0' ran 2 times in the step, and the model, or parts of it"),
        (_encoder_only, "4 of 7 blocks were not called in the step, and neither was the Autoencoder"),
    ],
)
def test_a_step_that_no_one_plan_is_for_is_refused(step: Step, message: str) -> None:
    model = _model()
    with pytest.raises(actckpt.BlocksError, match=message):
        actckpt.plan(lambda: list(_steps(model, step, 1)), model=model, activation_budget="70%")
    assert _num_hooks(model) == 0
