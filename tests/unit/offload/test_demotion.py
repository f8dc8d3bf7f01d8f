"""Plans of PREFER_OFFLOAD follow from the stalls of the step before."""

from __future__ import annotations

import dataclasses

import pytest

from actckpt._offload import demotion
from actckpt._offload.demotion import Steps


@dataclasses.dataclass
class Stall:
    stall_seconds: float
    is_settled: bool = True

    @property
    def is_late(self) -> bool:
        return self.stall_seconds >= 50e-6


def run_step(steps: Steps, *regions: list[float]) -> list[set[int]]:
    """Run forward and backward of some regions that stall so long for each place; returns what each kept."""
    plans, kept = [], []
    for stalls in regions:
        plan = steps.region()
        plans.append(plan)
        wanted = {place for place in range(len(stalls)) if plan.wants(place)}
        kept.append(set(range(len(stalls))) - wanted)
        for place in sorted(wanted):
            plan.moved(place, Stall(stalls[place]))
    for plan in reversed(plans):
        plan.read()
    return kept


def test_the_first_two_steps_demote_nothing() -> None:
    steps = Steps()
    kept = [run_step(steps, [1.0, 0.0])[0] for _ in range(3)]
    assert kept == [set(), set(), {0}]


def test_the_worst_half_of_the_stall_is_demoted_per_step_and_stays_so() -> None:
    steps = Steps()
    stalls = [0.001, 0.004, 0.0, 0.002, 0.001]
    kept = [run_step(steps, stalls)[0] for _ in range(7)]
    assert kept[2] == {1}
    assert kept[3] == {1, 3}
    assert kept[4] == {0, 1, 3}
    assert kept[5] == kept[6] == {0, 1, 3, 4}  # all that stalls; the one in time is still moved


def test_waits_no_longer_than_asking_demote_nothing() -> None:
    steps = Steps()
    assert [run_step(steps, [10e-6] * 20)[0] for _ in range(5)] == [set()] * 5


def test_stalls_of_less_than_a_hundredth_of_the_step_demote_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(demotion.time, "perf_counter", lambda: now[0])
    for seconds, expected in ((1.1, set()), (0.9, {0})):
        steps = Steps()
        for _ in range(2):
            run_step(steps, [0.01, 0.0])
            now[0] += seconds
        assert run_step(steps, [0.01, 0.0]) == [expected]


def test_a_region_that_is_gone_ends_its_step() -> None:
    steps = Steps()
    for _ in range(2):
        run_step(steps, [1.0])
    for _ in range(3):
        assert not steps.region().wants(0)  # the first of its step, each time


def test_a_plan_does_not_change_within_its_step() -> None:
    steps = Steps()
    for _ in range(2):
        run_step(steps, [0.0])
    first = steps.region()
    first.moved(0, Stall(5.0))
    assert first.wants(0) and steps.region().wants(0)
    first.read()
    assert first.wants(0) and not steps.region().wants(0)


def test_regions_of_one_place_are_told_apart_by_their_order_in_the_step() -> None:
    steps = Steps()
    kept = [run_step(steps, [0.0], [1.0], [0.0]) for _ in range(4)]
    assert kept[2] == kept[3] == [set(), {0}, set()]


def test_a_backward_of_an_older_step_does_not_end_the_one_under_way() -> None:
    steps = Steps()
    for _ in range(2):
        run_step(steps, [0.0])
    old = steps.region()
    old.moved(0, Stall(0.0))
    old.read()
    new = steps.region()
    new.moved(0, Stall(1.0))
    old.read()  # again, as with retain_graph
    assert steps.region().wants(0)  # the second region of the same step
    new.read()
    assert not steps.region().wants(0)


def test_places_without_end_do_not_grow_the_plan_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "_MAX_PLACES", 10)
    steps = Steps()
    for step in range(100):
        plan = steps.region()
        for place in range(20):
            plan.moved((step, place), Stall(1.0))
        assert len(plan._plan._timings) == 10
        assert len(plan._plan.kept) < 20
        plan.read()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_stalls_are_demoted_in_order_of_saving(count: int) -> None:
    steps = Steps()
    for _ in range(2):
        run_step(steps, [0.001] * count)
    assert run_step(steps, [0.001] * count) == [set(range((count + 1) // 2))]
