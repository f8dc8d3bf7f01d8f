"""Steps whose stream is being captured into a CUDA graph: gradients of plain training, or one line that says why not.

The simulated device captures nothing: it runs what it is given, and fails where CUDA would.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from demo_training import METHODS, Training
from internals.stores import offload_from
from oracle import assert_equal
from sim import device
from torch import Tensor
from torch.nn import functional

import actckpt
from actckpt import Action
from actckpt._offload import notices
from actckpt.demo import Block


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    offload_from(monkeypatch, 16 << 10)
    monkeypatch.setattr(notices, "_warned", set())


@contextmanager
def _capture() -> Iterator[None]:
    side = torch.Stream("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side, device.capturing(side), pytest.MonkeyPatch.context() as patched:
        for name in ("synchronize", "empty_cache"):
            patched.setattr(torch.accelerator, name, lambda *_: pytest.fail("waits in a capture"))
        yield
    torch.accelerator.current_stream().wait_stream(side)


def _captured(training: Training, *, num_warm_ups: int = 3) -> list[Tensor]:
    """Return the gradients of a step in a capture, after warm-up steps."""
    for _ in range(num_warm_ups):
        training.gradients()
    torch.manual_seed(1)
    training.model.zero_grad()
    with _capture():
        training.step()
    torch.accelerator.synchronize()
    return [parameter.grad.cpu() for parameter in training.model.parameters() if parameter.grad is not None]


_APPLIED: dict[str, Callable[[Any], object]] = {
    name: lambda model, policy=policy: actckpt.apply(model, policy, Block)
    for name, policy in {
        "replay": [],
        "matmuls": "matmuls",
        "attention": "attention",
        "places": {"**::aten.silu": "recompute"},
        "prefer offload": "prefer_offload",
    }.items()
}


@pytest.mark.parametrize("method", _APPLIED)
def test_policies_work_in_a_capture(method: str) -> None:
    """Dropout is drawn once: what it makes is kept."""
    expected = Training().gradients()
    assert_equal(_captured(Training(_APPLIED[method])), expected)


def test_a_policy_that_replays_all_holds_less_in_a_capture() -> None:
    def held_bytes(apply: Callable[[Any], object]) -> int:
        training = Training(apply)
        training.gradients()
        training.model.zero_grad()
        before = torch.accelerator.memory_allocated()
        with _capture():
            loss = functional.cross_entropy(training.model(training.tokens).flatten(0, 1), training.tokens.flatten())
            held = torch.accelerator.memory_allocated() - before
            loss.backward()
        return held

    assert held_bytes(_APPLIED["replay"]) < 0.6 * held_bytes(METHODS["plain"])


@pytest.mark.parametrize("method", ["offload", "offloaded inputs of a replay"])
def test_what_a_captured_step_offloads_stays_with_one_warning(method: str, caplog: pytest.LogCaptureFixture) -> None:
    def apply(model: Any) -> None:
        if method == "offload":
            actckpt.apply(model, "offload", Block, min_bytes=0)
        else:
            actckpt.apply(model, [], Block, offload_inputs=True)

    expected = Training().gradients()
    training = Training(apply)
    training.gradients()
    actckpt.reset_stats()
    assert_equal(_captured(training, num_warm_ups=0), expected)
    assert actckpt.stats().kept_capturing > 0 == actckpt.stats().offloaded_bytes
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "captured into a CUDA graph are not offloaded" in warning and "kept_capturing" in warning


@pytest.mark.parametrize("share", ["25%", "50%"])
def test_a_plan_without_offload_works_in_a_capture(share: str) -> None:
    expected = Training().gradients()
    actckpt.configure(host_limit=0)
    training = Training(lambda model: actckpt.apply(model, activation_budget=share, race=False))
    for _ in range(4):
        training.gradients()
    plan = training.plan
    assert plan.costs.d2h_bytes_per_s == 0 < plan.overhead_seconds
    actckpt.remove(training.model)
    actckpt.apply(training.model, policy=plan)
    actckpt.reset_stats()
    assert_equal(_captured(training), expected)
    assert actckpt.stats().kept_capturing == 0 < actckpt.stats().replayed_operators


def test_what_a_plan_reruns_is_replayed_in_a_capture() -> None:
    expected = Training().gradients()
    actckpt.configure(host_limit=0)
    training = Training()
    plan = actckpt.plan(training.step, model=training.model, activation_budget="25%", race=False)
    is_block = tuple(name is not None for name in plan.blocks or ())
    plan = dataclasses.replace(
        plan, rerun=is_block, actions=tuple(dict.fromkeys(a, Action.RECOMPUTE) for a in plan.actions)
    )
    actckpt.apply(training.model, policy=plan)
    training.gradients()
    assert actckpt.stats().rerun_regions > 0
    actckpt.reset_stats()
    assert_equal(_captured(training, num_warm_ups=0), expected)
    assert actckpt.stats().rerun_regions == 0 < actckpt.stats().replayed_operators


def test_a_budget_refuses_a_capture_and_says_what_to_capture() -> None:
    expected = Training().gradients()
    training = Training(lambda model: actckpt.apply(model, activation_budget="50%", race=False))
    for _ in range(3):
        training.gradients()
    with pytest.raises(actckpt.errors.BlocksError, match=r"CUDA graph.*report\(model\)\.plan.*policy=plan"), _capture():
        training.step()
    assert_equal(training.gradients(), expected)


def test_a_rerun_that_restores_random_numbers_refuses_a_capture() -> None:
    training = Training(METHODS["rerun"])
    training.gradients()
    with (
        pytest.raises(actckpt.errors.ActckptError, match=r"CUDA graph.*preserve_rng_state=False.*policy=\[\]"),
        _capture(),
    ):
        training.step()


def test_a_rerun_without_random_numbers_works_in_a_capture() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).to("sim")
    x = torch.randn(256, 64, device="sim", requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    for _ in range(3):
        actckpt.checkpoint(block, x, preserve_rng_state=False).square().sum().backward()
    x.grad = None
    with _capture():
        actckpt.checkpoint(block, x, preserve_rng_state=False).square().sum().backward()
    torch.accelerator.synchronize()
    assert_equal(x.grad.cpu(), expected.cpu())
