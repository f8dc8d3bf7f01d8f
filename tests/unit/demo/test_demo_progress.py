"""What the demo says while it trains."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from actckpt.demo import progress
from actckpt.demo.methods import METHODS
from actckpt.demo.progress import Bars, Lines
from actckpt.demo.run import prepare_demo, run_demo
from actckpt.demo.settings import DemoSettings


def test_a_file_gets_a_line_when_a_method_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("none", "torch-checkpoint")
    settings = DemoSettings(
        steps=2, layers=1, dim=32, heads=2, seq=16, batch=1, plot=False, out=tmp_path, methods=names, device="cpu"
    )
    assert run_demo(prepare_demo(settings)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" loss")[0] for line in lines] == [
        "none (method 1 of 2): step 2 of 2,",
        "torch-checkpoint (method 2 of 2): step 2 of 2,",
    ]


def test_a_long_method_says_every_ten_seconds_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 4.0, 11.0, 15.0, 22.0, 23.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    file = io.StringIO()
    with Lines(METHODS[:1], 4, Console(file=file)) as lines:
        lines.begin(METHODS[0])
        for _ in range(3):
            lines.step(1.5)
        lines.race()
        lines.step(0.5)
    assert file.getvalue().splitlines() == [
        "none (method 1 of 1): step 2 of 4, loss 1.500, 11 s",
        "none (method 1 of 1): plans take turns, 22 s",
        "none (method 1 of 1): step 4 of 4, loss 0.500, 23 s",
    ]


def test_a_terminal_gets_a_bar_for_each_method() -> None:
    file = io.StringIO()
    with Bars(METHODS[:2], 1, Console(file=file, force_terminal=True, width=100)) as bars:
        bars.begin(METHODS[0])
        bars.step(1.25)
        bars.race()
    assert "1/1" in file.getvalue() and "0/1" in file.getvalue() and "plans take turns" in file.getvalue()
