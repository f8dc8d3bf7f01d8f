"""What a block takes: the least of several turns."""

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
