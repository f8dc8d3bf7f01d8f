"""What cost tables say that blocks and their reruns take: what is timed, and which of several times counts."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from oracle import assert_equal, gradients
from test_budget_profiling import Model
from test_budgets import Block
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import actckpt
from actckpt._budget import timing
from actckpt._budget.timing import Times
from actckpt._core import devices


class SlowAtTheEnd(Block):
    """Takes a second, and 20 more after the last tensor that it saves."""

    clock: ClassVar[SimpleNamespace]

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += 1
        result = super().forward(x)
        self.clock.seconds += 20
        return result + 1


@pytest.fixture
def _clock_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(SlowAtTheEnd, "clock", clock, raising=False)
    for name in ("moment", "host_seconds"):
        monkeypatch.setattr(devices, name, lambda device: clock.seconds)


@pytest.mark.usefixtures("_clock_of_blocks")
@pytest.mark.parametrize(("is_applied", "stops_early"), [(False, True), (True, True), (True, False)])
def test_reruns_take_what_forward_takes_until_its_last_saved_tensor(is_applied: bool, stops_early: bool) -> None:
    """All of it, where they go to the end."""
    model = Model(SlowAtTheEnd)
    x = torch.randn(8, 16, 32)
    if is_applied:
        with actckpt.set_checkpoint_early_stop(stops_early):
            actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
            for _ in range(3):
                model(x).backward()
        plan = actckpt.report(model).plan
    else:
        step = functools.partial(_step, model, x)
        plan = actckpt.plan(step, model=model, blocks="blocks.*", activation_budget="80%", race=False)
    assert plan is not None
    blocks = [block for block in plan.costs.blocks if block.rerun]
    assert blocks
    assert all((block.forward_s, block.rerun_seconds) == (21, 1 if stops_early else 21) for block in blocks)


def _step(model: nn.Module, x: Tensor) -> None:
    model(x).backward()


class OtherEachTime(Block):
    """Runs other operators each time, and no attribute tells."""

    numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result + result[..., : 1 + next(self.numbers) % 7].exp().sum()


def test_blocks_of_which_a_rerun_fails_are_planned_without_one() -> None:
    model = Model(OtherEachTime)
    actckpt.apply(model, blocks="blocks.*", activation_budget="90%", race=False)
    for _ in range(4):
        model(torch.randn(8, 16, 32)).backward()
    plan = actckpt.report(model).plan
    assert plan is not None and not any(block.rerun for block in plan.costs.blocks)
    assert plan.overhead_seconds > 0
    assert "Never run again as a whole: blocks.0-3: it failed with RerunMismatchError: " in plan.explain()


class RunsForwardAlone(Block):
    """Does not run in backward."""

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("not in backward")
        return super().forward(x)


class SwallowsErrors(Block):
    """Words every error, the one that ends reruns among them."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x) + 1
        except BaseException as error:
            raise RuntimeError("the block failed") from error


@pytest.mark.parametrize("kind", [RunsForwardAlone, SwallowsErrors])
def test_blocks_whose_reruns_raise_are_trained_where_nothing_needs_one(kind: type[Block]) -> None:
    plain, model = Model(kind), Model(kind)
    model.load_state_dict(plain.state_dict())
    actckpt.apply(model, blocks="blocks.*", activation_budget="2GiB")
    for _ in range(3):
        x = torch.randn(8, 16, 32)
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(1)
            each(x).backward()
        assert_equal(gradients(model), gradients(plain))
    plan = actckpt.report(model).plan
    assert plan is not None and not any(block.rerun for block in plan.costs.blocks)


class _Seen(TorchDispatchMode):
    """A mode of the program that only looks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Notes(Block):
    """Notes which modes each call runs below, and whether autocast keeps what it casts."""

    modes: ClassVar[list[tuple[str, ...]]] = []
    caches: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(tuple(type(mode).__name__ for mode in _get_current_dispatch_mode_stack()))
        self.caches.append(torch.is_autocast_cache_enabled())
        return super().forward(x)


@pytest.mark.parametrize("is_applied", [False, True])
def test_blocks_are_timed_below_the_modes_of_the_program_alone(
    is_applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, run = [], timing._timed

    def noted(*args: Any) -> Any:
        Notes.modes.clear()
        found = run(*args)
        timed.extend(Notes.modes)  # of the forward, and of its rerun
        return found

    monkeypatch.setattr(timing, "_timed", noted)
    model, x = Model(Notes), torch.randn(8, 16, 32)
    actckpt.configure(observers=[_Seen])
    with _Seen():
        if is_applied:
            actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
            model(x).backward()
        else:
            step = functools.partial(_step, model, x)
            actckpt.plan(step, model=model, blocks="blocks.*", activation_budget="80%", race=False)
        assert set(timed) == {("_Seen",), ("_Seen", "Recorder")}


def test_what_is_timed_leaves_no_casts_in_the_cache_of_autocast() -> None:
    model = Model(Notes)
    actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
    Notes.caches.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 16, 32))
        assert torch.is_autocast_cache_enabled()
    loss.float().backward()
    # All but the calls of the step, and the few runs that show how many bytes a block needs: kept, replayed and rerun.
    assert Notes.caches.count(False) >= 15 and Notes.caches.count(True) <= 2 * len(model.blocks) + 6


_CPU = torch.device("cpu")


def _spans(*seconds: float) -> tuple[timing._Span, ...]:
    """Return what takes the host so many seconds."""
    return tuple(timing._Span(each, each) for each in seconds)


def _fastest(monkeypatch: pytest.MonkeyPatch, turns: list[tuple[Any, Any, Any]], *, has_rerun: bool = True) -> Times:
    """Return the times of turns: plain and recorded, forward and backward each, and of the rerun alone."""
    ways: list[Any] = ["plain", "recorded", "rerun"]
    left = {way: [turn[number] for turn in turns] for number, way in enumerate(ways)}
    monkeypatch.setattr(timing, "_timed", lambda way, _: _spans(*left[way].pop(0)))
    monkeypatch.setattr(timing, "_timed_rerun", lambda way, _: _spans(left[way].pop(0)))
    monkeypatch.setattr(timing, "_TIMED_S", 0.0)
    rerun = ways[2] if has_rerun else None
    return timing.fastest(ways[0], recorded=ways[1], rerun=rerun, device=_CPU)


def test_the_least_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = ((2.0, 5.0), (3.0, 4.0), 1.5), ((1.0, 6.0), (2.0, 5.0), 0.5)
    assert _fastest(monkeypatch, [slow, fast]) == (1.0, 5.0, 2.0, 4.0, 0.5, 0.0)


def test_a_block_that_may_not_run_again_has_no_such_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = ((1.0, 2.0), (1.5, 2.5), None)
    assert _fastest(monkeypatch, [turn] * 2, has_rerun=False) == (1.0, 2.0, 1.5, 2.5, None, 0.0)
