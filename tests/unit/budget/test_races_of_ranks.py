"""Ranks that race: all run the same plan in each turn, and the slowest rank's time decides, on all of them alike."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from actckpt._budget import rank_races, turns
from actckpt._budget.rank_races import Board, RaceOfRanks
from actckpt.planner import Plan, solve

CPU = torch.device("cpu")
_numbers = itertools.count()

#: Seconds of a step, by rank and plan.
Seconds = Callable[[int, str], float]


@pytest.fixture(scope="module")
def plan() -> Plan:
    value = {"name": "a", "bytes": 1, "inputs": [], "recompute_s": 1}
    block = {"forward_s": 1, "backward_s": 1, "working_set_bytes": 1, "values": [value]}
    return solve({"version": 1, "classes": {"block": block}, "stack": ["block"] * 2, "fixed_bytes": 0}, budget=100)


class Steps:
    """Steps of ranks that wait for each other, on a clock of their own."""

    def __init__(self, plan: Plan, names: Sequence[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        monkeypatch.setattr(turns.devices, "moment", lambda _: self._now)
        store, number = dist.HashStore(), str(next(_numbers))
        boards = [Board(number, store, rank, len(names)) for rank in range(len(names))]
        self.races: list[RaceOfRanks | None] = [
            RaceOfRanks([(name, dataclasses.replace(plan, chosen=name)) for name in each], CPU, board)
            for each, board in zip(names, boards, strict=True)
        ]
        self.plans: list[Plan | None] = [None] * len(names)

    def run(self, seconds: Seconds, late: int | None = None) -> list[str]:
        """Run a step and return what each rank ran; one rank may be late and not come to it."""
        begun = []
        for rank, race in enumerate(self.races):
            if race is not None and rank != late:
                self.plans[rank] = race.next()
                begun.append(race.turn())
                if race.is_over:
                    self.races[rank] = None
        ran = [plan.chosen for plan in self.plans if plan is not None]
        self._now += max(seconds(rank, name) for rank, name in enumerate(ran))
        for turn in begun:
            if turn is not None:
                turn.end()
        return ran

    def run_to_the_end(self, seconds: Seconds, most: int = 100) -> list[list[str]]:
        found = []
        while any(self.races) and len(found) < most:
            found.append(self.run(seconds))
        assert not any(self.races)
        return found


def test_the_slowest_rank_decides_and_all_stay_with_the_same(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(0, "plan"): 1.0, (1, "plan"): 5.0, (0, "rerun"): 3.0, (1, "rerun"): 1.0, (0, "b"): 4.0, (1, "b"): 4.0}
    steps = Steps(plan, [["plan", "rerun", "b"]] * 2, monkeypatch)
    ran = steps.run_to_the_end(lambda rank, name: times[rank, name])
    assert all(one == two for one, two in ran)
    assert [each.chosen for each in steps.plans] == ["rerun", "rerun"]
    assert [row.seconds for row in steps.plans[0].race] == [5.0, 3.0, 4.0]
    assert steps.plans[0].race == steps.plans[1].race
    assert {name: sum(one == name for one, _ in ran) for name in ("rerun", "b")} == {"rerun": 7, "b": 6}


def test_what_one_rank_cannot_run_does_not_race(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(plan, [["plan", "a", "b"], ["plan", "b", "c"], ["plan", "c", "b"]], monkeypatch)
    ran = steps.run_to_the_end(lambda _, name: 2.0 if name == "plan" else 1.0)
    assert {name for each in ran for name in each} == {"plan", "b"}
    assert [each.chosen for each in steps.plans] == ["b"] * 3


@pytest.mark.parametrize("names", [[["plan"], ["plan", "a"]], [["plan", "a"], ["plan"]]])
def test_a_rank_whose_gain_is_sure_keeps_its_plan_and_the_others_race(
    names: list[list[str]], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(plan, names, monkeypatch)
    steps.run_to_the_end(lambda rank, name: 2.0 if name == "plan" and len(names[rank]) > 1 else 1.0)
    assert [each.chosen for each in steps.plans] == [each[-1] for each in names]


@pytest.mark.parametrize("names", [[["plan", "a"], ["plan", "b"]], [["plan"], ["plan"]]])
def test_nothing_in_common_is_no_race(names: list[list[str]], plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(plan, names, monkeypatch)
    ran = steps.run_to_the_end(lambda *_: 1.0, most=3)
    assert {name for each in ran for name in each} == {"plan"}
    assert all(not each.race for each in steps.plans)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("num_before", [1, 2, 3, 10, 14])
def test_a_rank_that_is_left_behind_leaves_the_others_with_their_plan(
    late: int, num_before: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends its training, or makes another plan: nothing waits for it."""
    steps = Steps(plan, [["plan", "a"]] * 2, monkeypatch)
    for _ in range(num_before):
        steps.run(lambda *_: 1.0)
    for _ in range(rank_races._MOST_WAITED + 20):
        steps.run(lambda *_: 1.0, late=late)
    race, found = steps.races[1 - late], steps.plans[1 - late]
    assert race is None and found.chosen == "plan" and not found.race


def test_a_rank_that_said_nothing_is_waited_for_only_so_long(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns.devices, "moment", lambda _: 0.0)
    for rank in (0, 1):
        entries = [("plan", plan), ("a", plan)]
        race = RaceOfRanks(entries, CPU, Board(str(next(_numbers)), dist.HashStore(), rank, 2))
        num = next(number for number in itertools.count(1) if race.next() is plan and race.is_over)
        assert num <= rank_races._MOST_WAITED + 1


def test_a_store_that_is_gone_ends_the_race(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(plan, [["plan", "a"]] * 2, monkeypatch)
    steps.run(lambda *_: 1.0)

    def gone(*_: object) -> bool:
        raise dist.DistNetworkError("Connection was likely closed")

    for race in steps.races:
        monkeypatch.setattr(race._board, "concluded", gone)
    steps.run_to_the_end(lambda *_: 1.0)
    assert all(each.chosen == "plan" and not each.race for each in steps.plans)
