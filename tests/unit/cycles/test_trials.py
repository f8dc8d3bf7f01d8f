"""Which candidate plan is kept, by a clock of the test."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from actckpt._core import devices
from actckpt._cycles.trials import Candidate, Trials
from actckpt.planner import solve

_COSTS = {
    "version": 1,
    "classes": {"block": {"forward_s": 1, "backward_s": 2, "working_set_bytes": 3}},
    "stack": ["block"],
}
_BUDGET = 100


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
    now = 0.0
    monkeypatch.setattr(devices, "moment", lambda device: now)
    monkeypatch.setattr(devices, "seconds_between", lambda began, ended: ended - began)
    monkeypatch.setattr(devices, "has_passed", lambda moment: True)
    plan = solve(_COSTS, budget=_BUDGET)
    trials = Trials([Candidate(name, plan, 50, is_measured=name == "plan") for name in seconds], _BUDGET)
    found = 0
    for _ in itertools.takewhile(lambda _: not trials.is_over, range(100)):
        candidate = trials.next()
        if not candidate.is_measured:
            trials.note_peak(peaks.get(candidate.name, 60))
            continue
        began, now = now, now + seconds[candidate.name](len(candidate.cycles))
        trials.note_time(began, torch.device("cpu"))
        found += 1
    result = trials.result()
    assert (result.chosen, found) == (chosen, num_cycles)
    assert [row.name for row in result.race] == list(seconds) and result.peak_bytes <= _BUDGET
