"""Devices that use the host's memory: nothing is moved to the host, one warning says so, and plans know it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_training import METHODS, Training
from internals.stores import offload_from
from oracle import assert_equal
from sim import device
from sim.device.accelerator import offloading

import actckpt
from actckpt import Action
from actckpt._offload import notices
from actckpt.comparison import default_policies, offloads
from actckpt.doctor import examine

_STAYS = "this GPU uses the host's memory"


@pytest.fixture(autouse=True)
def _integrated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notices, "_warned", set())
    with device.integrated(), offloading():
        yield


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("method", ["offload", "offloaded inputs"])
def test_what_the_program_offloads_stays_with_one_warning(method: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = Training().gradients()
    training = Training(METHODS[method])
    actckpt.reset_stats()
    for _ in range(3):
        assert_equal(training.gradients(), expected)
    stats = actckpt.stats()
    assert stats.kept_full > 0 == stats.offloaded_bytes == stats.store_bytes == device.num_registered_bytes()
    (warning,) = _warnings(caplog)
    assert _STAYS in warning and "policy='recompute'" in warning and "spill_dir" in warning


@pytest.mark.parametrize("to", ["auto", "host"])
def test_the_report_of_a_block_says_that_nothing_was_moved(to: Any, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(64, 64, device="sim", requires_grad=True)
    with actckpt.offload(to, min_bytes=0) as block:
        y = (x * 1).sin()
    y.sum().backward()
    assert block.report().offloaded_bytes == 0 and "Nothing was moved" in str(block.report())
    assert torch.equal(x.grad.cpu(), x.detach().cpu().cos())
    assert len(_warnings(caplog)) == 1


def test_a_spill_folder_takes_what_the_host_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = Training().gradients()
    with offloading(spill_dir=tmp_path, host_limit=16 << 20):
        training = Training(METHODS["offload"])
        actckpt.reset_stats()
        assert_equal(training.gradients(), expected)
        stats = actckpt.stats()
    assert stats.kept_full == 0 < stats.offloaded_bytes == stats.peak_store_bytes
    assert _warnings(caplog) == []


@pytest.mark.parametrize("spills", [False, True])
def test_budgets_do_not_offload(spills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload_from(monkeypatch, 16 << 10)
    expected = Training().gradients()
    with offloading(spill_dir=tmp_path if spills else None):
        training = Training()
        plan = actckpt.plan(training.step, model=training.model, activation_budget="50%")
        actckpt.apply(training.model, activation_budget="50%", race=False)
        for _ in range(3):
            assert_equal(training.gradients(), expected)
    for found in (plan, training.plan):
        assert found.costs.d2h_bytes_per_s == found.costs.h2d_bytes_per_s == 0
        assert not any(action is Action.OFFLOAD for actions in found.actions for action in actions.values())
        assert found.step_seconds > found.plain_seconds


def test_offload_is_no_default_of_comparisons() -> None:
    model = Training().model
    assert "offload" not in default_policies(offloads=offloads(model))


def test_doctor_says_so(tmp_path: Path) -> None:
    found = dict(examine(measure=False))
    assert found["offload of GPU tensors"] == "off: the GPU uses the host's memory, where a copy frees none"
    assert "pinned memory limit" not in found
    with offloading(spill_dir=tmp_path):
        assert dict(examine(measure=False))["offload of GPU tensors"].startswith(f"to disk only, {tmp_path}: the GPU")
