"""What cost tables say that blocks take: reruns end early, and what watches a step is not timed."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from oracle import assert_equal
from test_budget_profiling import Model
from test_budgets import Block
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import actckpt
from actckpt._budget import timing
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


_calls = itertools.count()


class OtherEachTime(Block):
    """Runs other operators each time, and no attribute tells."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result + result[..., : 1 + next(_calls) % 7].exp().sum()


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
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    plan = actckpt.report(model).plan
    assert plan is not None and not any(block.rerun for block in plan.costs.blocks)


class _Seen(TorchDispatchMode):
    """A mode of the program that only looks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NotesModes(Block):
    """Takes down which modes its calls run below."""

    found: ClassVar[list[tuple[str, ...]]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(tuple(type(mode).__name__ for mode in _get_current_dispatch_mode_stack()))
        return super().forward(x)


@pytest.mark.parametrize("is_applied", [False, True])
def test_blocks_are_timed_below_the_modes_of_the_program_alone(
    is_applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, run = [], timing._timed

    def noted(*args: Any) -> Any:
        NotesModes.found.clear()
        found = run(*args)
        timed.extend(NotesModes.found)  # of the forward, and of its rerun
        return found

    monkeypatch.setattr(timing, "_timed", noted)
    model, x = Model(NotesModes), torch.randn(8, 16, 32)
    actckpt.configure(observers=[_Seen])
    with _Seen():
        if is_applied:
            actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
            model(x).backward()
        else:
            step = functools.partial(_step, model, x)
            actckpt.plan(step, model=model, blocks="blocks.*", activation_budget="80%", race=False)
        assert set(timed) == {("_Seen",), ("_Seen", "Recorder")}


class NotesCache(Block):
    """Takes down whether autocast keeps what it casts."""

    found: ClassVar[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(torch.is_autocast_cache_enabled())
        return super().forward(x)


def test_what_is_timed_leaves_no_casts_in_the_cache_of_autocast() -> None:
    model = Model(NotesCache)
    actckpt.apply(model, blocks="blocks.*", activation_budget="80%", race=False)
    NotesCache.found.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 16, 32))
        assert torch.is_autocast_cache_enabled()
    loss.float().backward()
    # All but the calls of the step, and the few runs that show how many bytes a block needs: kept, replayed and rerun.
    assert NotesCache.found.count(False) >= 15 and NotesCache.found.count(True) <= 2 * len(model.blocks) + 6
