"""What a rerun takes: as long as it is timed alone, and no more on top than saving values can take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actckpt._budget import timing
from actckpt._budget.timing import Times

_CPU = torch.device("cpu")


def _spans(*seconds: float) -> tuple[timing._Span, ...]:
    """Return what takes the host so many seconds."""
    return tuple(timing._Span(each, each) for each in seconds)


def _fastest(
    monkeypatch: pytest.MonkeyPatch, turns: list[tuple[Any, Any, Any, Any]], *, has_rerun: bool = True
) -> Times:
    """Return the times of turns: plain, recorded and rerun, forward and backward each, and of the rerun alone."""
    ways: list[Any] = ["plain", "recorded", "rerun"]
    left = {way: [turn[number] for turn in turns] for number, way in enumerate(ways)}
    alone = [turn[3] for turn in turns]

    def seconds(way: Any, _: Any) -> Any:
        return _spans(*left[way].pop(0))

    def rerun_seconds(way: Any, device: Any) -> Any:
        return (*seconds(way, device), *_spans(alone.pop(0)))

    monkeypatch.setattr(timing, "_timed", seconds)
    monkeypatch.setattr(timing, "_timed_rerun", rerun_seconds)
    monkeypatch.setattr(timing, "_TIMED_S", 0.0)
    rerun = ways[2] if has_rerun else None
    return timing.fastest(ways[0], recorded=ways[1], rerun=rerun, device=_CPU, num_values=1000)


def test_the_least_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ((2.0, 5.0), (3.0, 4.0), (2.5, 4.0), 1.5)
    fast = ((1.0, 6.0), (2.0, 5.0), (3.0, 9.0), 0.5)
    assert _fastest(monkeypatch, [slow, fast])[:4] == (1.0, 5.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("rerun", "alone_s", "expected_s"),
    [
        ((1.0, 2.6), 0.6, 0.6),
        ((1.0, 2.603), 0.6, 0.603),  # a thousand values take at most five milliseconds
        ((1.0, 3.9), 0.6, 0.605),
        ((0.5, 2.0), 0.6, 0.6),
        ((1.0, 2.6), 1.4, 1.4),
    ],
)
def test_what_a_rerun_takes_is_bounded(
    rerun: tuple[float, float], alone_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = ((1.0, 2.0), (1.5, 2.5), rerun, alone_s)
    assert _fastest(monkeypatch, [turn] * 2).rerun_s == pytest.approx(expected_s)


def test_a_block_that_may_not_run_again_has_no_such_time(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = ((1.0, 2.0), (1.5, 2.5), None, None)
    assert _fastest(monkeypatch, [turn] * 2, has_rerun=False) == (1.0, 2.0, 1.5, 2.5, None, 0.0)
