"""Plans of PREFER_CPU_OFFLOAD follow from the stalls of the step before."""

from __future__ import annotations

import dataclasses

import pytest

from actckpt.engine.demotion import Demotions, StepPlan


@dataclasses.dataclass
class Stall:
    stall_seconds: float
    is_settled: bool = True

    @property
    def is_late(self) -> bool:
        return self.stall_seconds >= 50e-6


def run_step(demotions: Demotions, stalls: list[float], structure: object = "s") -> StepPlan:
    plan = demotions.begin(structure)
    for place, seconds in enumerate(stalls):
        if plan.wants(place):
            plan.moved(place, Stall(seconds))
    return plan


def test_the_first_two_steps_demote_nothing() -> None:
    demotions = Demotions()
    kept = [run_step(demotions, [1.0, 0.0]).kept for _ in range(3)]
    assert kept == [frozenset(), frozenset(), frozenset({0})]


def test_the_worst_half_of_the_stall_is_demoted_per_step_and_stays_so() -> None:
    demotions = Demotions()
    stalls = [0.001, 0.004, 0.0, 0.002, 0.001]
    kept = [run_step(demotions, stalls).kept for _ in range(7)]
    assert kept[2] == {1}
    assert kept[3] == {1, 3}
    assert kept[4] == {0, 1, 3}
    assert kept[5] == kept[6] == {0, 1, 3, 4}  # all that stalls; the one in time is still moved


def test_waits_no_longer_than_asking_demote_nothing() -> None:
    demotions = Demotions()
    assert all(run_step(demotions, [10e-6] * 20).kept == frozenset() for _ in range(5))


def test_a_plan_does_not_change_within_its_step() -> None:
    demotions = Demotions()
    for _ in range(2):
        run_step(demotions, [0.0])
    plan = demotions.begin("s")
    plan.moved(0, Stall(5.0))
    assert plan.wants(0)
    assert not demotions.begin("s").wants(0)


def test_structures_are_apart_and_old_ones_forgotten() -> None:
    demotions = Demotions()
    for _ in range(3):
        run_step(demotions, [1.0], "a")
        run_step(demotions, [0.0], "b")
    assert not demotions.begin("a").wants(0) and demotions.begin("b").wants(0)
    for n in range(100):
        demotions.begin(n)
    assert demotions.begin("a").wants(0)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_stalls_are_demoted_in_order_of_saving(count: int) -> None:
    demotions = Demotions()
    for _ in range(2):
        run_step(demotions, [0.001] * count)
    assert demotions.begin("s").kept == set(range((count + 1) // 2))
