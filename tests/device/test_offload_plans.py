"""Plans for a budget that offload: what they promise of peak and time is what the device and its link show."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from demo_training import Training
from internals.stores import offload_from
from oracle import assert_equal
from sim import device

import actckpt
from actckpt import _C, Action
from actckpt._budget import bandwidth
from actckpt._budget.offloading import with_windows
from actckpt._core import devices
from actckpt._cycles import loop, solving
from actckpt._offload import session, stores
from actckpt.planner.costs import BLOCK_INPUT

_LAYERS = 8
#: Of what plain training holds beyond parameters and what else is there all the time.
_SHARES = (0.3, 0.5, 0.7)


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans offload tensors of the toy model, and set windows by themselves."""
    offload_from(monkeypatch, 16 << 10)
    actckpt.configure(max_inflight="auto")


def _seconds(training: Training) -> float:
    """Return the simulated seconds of a step."""
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    training.model.zero_grad()
    torch.accelerator.synchronize()
    begin.record()
    training.step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


class _Plainly:
    """What plain training comes to."""

    def __init__(self) -> None:
        training = Training(layers=_LAYERS)
        self.static_bytes = torch.accelerator.memory_allocated()
        self.gradients = training.gradients()
        self.peak = training.peak()
        self.seconds = _seconds(training)

    def budget(self, share: float) -> int:
        return int(self.static_bytes + share * (self.peak - self.static_bytes))


def _num_offloaded(plan: actckpt.Plan) -> int:
    return sum(action is Action.OFFLOAD for actions in plan.actions for action in actions.values())


def _check(training: Training, plan: actckpt.Plan, plainly: _Plainly, budget: int) -> float:
    """Check gradients, peak and time of a plan that is in force; return its ratio to plain."""
    assert_equal(training.gradients(), plainly.gradients)
    assert training.peak() <= budget
    assert_equal(training.gradients(), plainly.gradients)
    ratio = _seconds(training) / plainly.seconds
    predicted = plan.step_seconds / plan.plain_seconds
    print(f"budget {budget}: {ratio:.3f} of plain, predicted {predicted:.3f}, {_num_offloaded(plan)} offloaded")
    assert ratio == pytest.approx(predicted, abs=0.04)
    return ratio


@pytest.mark.parametrize("share", _SHARES)
def test_plans_in_training_hold_and_beat_those_that_only_recompute(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = _Plainly()
    budget = plainly.budget(share)

    def ratio(*, offloads: bool) -> float:
        training = Training(layers=_LAYERS)
        actckpt.apply(training.model, budget=budget, race=False)
        for _ in range(5):  # by then no other plan is tried
            training.peak()
        plan = training.plan
        assert (_num_offloaded(plan) > 0) is offloads
        found = _check(training, plan, plainly, budget)
        actckpt.remove(training.model)
        assert stores.limited(1 << 60) == 1 << 60, "its windows end with it"
        return found

    with_link = ratio(offloads=True)
    gc.collect()
    for module in (solving, loop):
        monkeypatch.setattr(module, "is_linked", lambda device, pins: False)
    assert with_link < ratio(offloads=False) - 0.02


def test_a_plan_of_a_step_offloads_and_is_predicted() -> None:
    plainly = _Plainly()
    budget = plainly.budget(0.5)
    training = Training(layers=_LAYERS)
    plan = actckpt.plan(training.step, model=training.model, budget=budget)
    assert _num_offloaded(plan) > 0 and plan.costs.d2h_bytes_per_s == pytest.approx(20e6)
    actckpt.apply(training.model, policy=plan)
    _check(training, plan, plainly, budget)
    assert training.peak() == pytest.approx(plan.peak_bytes, rel=0.03)


@pytest.mark.parametrize("rates", [(8e6, 20e6), (20e6, 8e6)], ids=["slower to the host", "slower from the host"])
def test_plans_use_the_rate_of_each_direction(rates: tuple[float, float]) -> None:
    """GH200 and GB200 differ by 2.5 times. A plan that takes the faster one for both is slower than it predicts."""
    plainly = _Plainly()
    budget = plainly.budget(0.5)
    with device.timed(link_bytes_per_s=rates, kernel_bytes_per_s=200e6):
        training = Training(layers=_LAYERS)
        plan = actckpt.plan(training.step, model=training.model, budget=budget, race=False)
        assert (plan.costs.d2h_bytes_per_s, plan.costs.h2d_bytes_per_s) == pytest.approx(rates)
        assert _num_offloaded(plan) > 0
        actckpt.apply(training.model, policy=plan)
        _check(training, plan, plainly, budget)


def test_what_the_store_has_no_room_for_is_not_planned_to_leave() -> None:
    budget = _Plainly().budget(0.5)
    gc.collect()
    actckpt.configure(host_limit="1MiB")
    training = Training(layers=_LAYERS)
    actckpt.apply(training.model, budget=budget, race=False)
    for _ in range(6):
        training.gradients()
    plan = training.plan
    offloaded = actckpt.planner.simulate(plan.costs, plan).host_peak_bytes
    assert 0 < offloaded <= 1 << 20
    actckpt.reset_stats()
    training.gradients()
    assert actckpt.stats().kept_full == 0


def test_the_race_in_training_is_timed_on_the_device_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plainly = _Plainly()
    budget = plainly.budget(0.6)
    training = Training(layers=_LAYERS)
    actckpt.apply(training.model, budget=budget)
    for _ in range(6):
        training.gradients()
        if actckpt.report(training.model).race_steps_left:
            break
    assert actckpt.report(training.model).race_steps_left > 0
    with monkeypatch.context() as patched:
        patched.setattr(torch.accelerator, "synchronize", None)
        while actckpt.report(training.model).race_steps_left:
            assert_equal(training.gradients(), plainly.gradients)
    torch.accelerator.synchronize()
    training.gradients()
    rows = {row.name: row for row in training.plan.race}
    assert len(rows) > 1
    least = min(row.seconds for row in rows.values() if row.seconds is not None)
    assert rows[training.plan.chosen].seconds == pytest.approx(least, rel=0.02)
    assert rows[training.plan.chosen].seconds == pytest.approx(_seconds(training), rel=0.05)
    assert training.peak() <= budget


def test_links_are_measured_whatever_the_default_device_is_with_pieces_that_fit_the_device() -> None:
    accelerator, sim = devices.available(), torch.device("sim", 0)
    assert accelerator is not None
    with torch.device("sim"):
        rates = bandwidth._copied(accelerator, sim)
    assert rates == (pytest.approx(20e6), pytest.approx(20e6))
    assert (
        bandwidth._piece_bytes(accelerator, sim)
        > bandwidth._piece_bytes(_Small("sim"), sim)
        == session.DEFAULT_MIN_BYTES
    )


def _inputs_offloaded(training: Training, budget: int) -> actckpt.Plan:
    """Return a plan that runs all blocks again from inputs that it offloads, with nothing read ahead of others."""
    plan = actckpt.plan(training.step, model=training.model, budget=budget, race=False)
    is_block = [name is not None for name in plan.blocks or ()]
    actions = [
        {name: Action.OFFLOAD if name == BLOCK_INPUT else Action.RECOMPUTE for name in found} if runs_again else found
        for found, runs_again in zip(plan.actions, is_block, strict=True)
    ]
    plan = dataclasses.replace(plan, actions=tuple(actions), rerun=tuple(is_block), max_inflight=0)
    return with_windows(plan)


def test_nothing_is_read_into_the_room_of_what_a_block_has_asked_for() -> None:
    plainly = _Plainly()
    training = Training(layers=_LAYERS)
    plan = _inputs_offloaded(training, plainly.budget(0.5))
    actckpt.apply(training.model, policy=plan)
    assert_equal(training.gradients(), plainly.gradients)
    ahead: list[int] = []
    for block in training.model.blocks:  # the last parameter whose gradient is computed: its input was asked for
        block.attention_norm.weight.register_post_accumulate_grad_hook(lambda _: ahead.append(_C.read_ahead_bytes()))
    training.step()
    assert ahead == [0] * _LAYERS


def test_originals_of_audits_are_moved_and_not_read_ahead() -> None:
    store = stores.store_for("sim")
    block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).to("sim")
    inputs = torch.randn(1024, 64, device="sim", requires_grad=True)
    moved, read = actckpt.stats().offloaded_bytes, store.engine.stats().reloaded_bytes
    x = inputs * 2
    for _ in range(2):  # what the second one asks for begins to read what the first one moved
        x = actckpt.checkpoint(block, x, policy=[], offload_inputs=True)
    x.sum().backward()
    assert actckpt.stats().offloaded_bytes - moved > 2 * inputs.nbytes, "nothing was audited"
    assert store.engine.stats().reloaded_bytes - read <= 2 * inputs.nbytes


class _Small(devices.Accelerator):
    def memory_info(self, device: torch.device) -> tuple[int, int]:
        return 0, 9 << 20
