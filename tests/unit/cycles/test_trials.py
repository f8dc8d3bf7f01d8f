"""Which candidate plan is kept, by a clock of the test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from actckpt._core import devices
from actckpt._cycles.trials import Candidate, Trials
from actckpt.planner import Plan, solve

_COSTS = {
    "version": 1,
    "classes": {"block": {"forward_s": 1, "backward_s": 2, "working_set_bytes": 3}},
    "stack": ["block"],
}
_BUDGET = 100
#: Seconds of cycles on a computer that other programs used at the same time, one row per round.
_RECORDED = {
    "plan": (3.61, 4.32, 0.73, 1.06, 0.24, 0.12, 0.07, 0.42, 0.54, 1.42, 1.18, 2.24, 3.44),
    "recompute": (1.43, 1.47, 0.55, 0.11, 0.51, 0.71, 2.88, 0.71, 1.36, 1.52, 2.11, 2.87, 1.46),
    "keep attention": (5.22, 0.41, 1.43, 1.76, 0.47, 0.77, 1.03, 1.10, 3.84, 1.16, 1.02, 5.90, 2.31),
}


def _constant(seconds: float) -> Callable[[int], float]:
    return lambda cycle: seconds


def _alternating(*seconds: float) -> Callable[[int], float]:
    return lambda cycle: seconds[cycle % len(seconds)]


@pytest.mark.parametrize(
    ("seconds", "peaks", "chosen", "num_cycles"),
    [
        # Much slower ones leave after a round, slower ones after three, and equal ones after twelve.
        ({"plan": _constant(1.0), "recompute": _constant(2.0)}, {}, "plan", 2),
        ({"plan": _constant(2.0), "recompute": _constant(1.0)}, {}, "recompute", 2),
        ({"plan": _constant(1.1), "recompute": _constant(1.0)}, {}, "recompute", 6),
        ({"plan": _alternating(1.0, 1.4), "recompute": _alternating(1.3, 1.0)}, {}, "recompute", 24),
        ({"plan": _constant(3.0), "keep": _constant(2.0), "recompute": _constant(1.8)}, {}, "recompute", 7),
        # One that needs more than the budget leaves, however fast it is.
        ({"plan": _constant(2.0), "keep": _constant(1.0)}, {"keep": 101}, "plan", 0),
    ],
)
def test_the_fastest_candidate_that_fits_is_kept(
    seconds: dict[str, Callable[[int], float]],
    peaks: dict[str, int],
    chosen: str,
    num_cycles: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, found = _tried(seconds, peaks, {}, monkeypatch)
    assert (result.chosen, found) == (chosen, num_cycles)
    assert [row.name for row in result.race] == list(seconds) and result.peak_bytes <= _BUDGET


@pytest.mark.parametrize("first", [0, 1])
def test_a_few_noisy_cycles_do_not_overrule_the_prediction(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {name: _alternating(*recorded[first:]) for name, recorded in _RECORDED.items()}
    predicted = {"plan": 0.1, "recompute": 0.4, "keep attention": 0.3}
    assert _tried(seconds, {}, predicted, monkeypatch)[0].chosen == "plan"


def test_a_prediction_that_many_cycles_contradict_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"plan": _alternating(1.3, 1.2, 1.9), "recompute": _alternating(1.0, 1.1)}
    result, found = _tried(seconds, {}, {"plan": 0.1, "recompute": 0.4}, monkeypatch)
    assert (result.chosen, found) == ("recompute", 12)


def _tried(
    seconds: dict[str, Callable[[int], float]],
    peaks: dict[str, int],
    predicted: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Plan, int]:
    """Return the result of trials and the number of timed cycles.

    Args:
        predicted: seconds that a candidate recomputes.
    """
    now = 0.0
    monkeypatch.setattr(devices, "moment", lambda device: now)
    monkeypatch.setattr(devices, "seconds_between", lambda began, ended: ended - began)
    monkeypatch.setattr(devices, "has_passed", lambda moment: True)
    solved = solve(_COSTS, budget=_BUDGET)
    plans = {name: dataclasses.replace(solved, recompute_seconds=predicted.get(name, 0.0)) for name in seconds}
    trials = Trials([Candidate(name, plan, 50, is_measured=name == "plan") for name, plan in plans.items()], _BUDGET)
    found = 0
    for _ in itertools.takewhile(lambda _: not trials.is_over, range(100)):
        candidate = trials.next()
        if not candidate.is_measured:
            trials.note_peak(peaks.get(candidate.name, 60))
            continue
        began, now = now, now + seconds[candidate.name](len(candidate.cycles))
        trials.note_time(began, torch.device("cpu"))
        found += 1
    return trials.result(), found
