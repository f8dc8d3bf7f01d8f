"""`actckpt compare script.py` and `actckpt plan script.py`: what they measure, print and exit with."""

from __future__ import annotations

import json
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest

import actckpt
from actckpt import cli
from actckpt._commands import messages

_SCRIPT = """
import torch

def model():
    block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return torch.nn.Sequential(*(block() for _ in range(5)))

def optimizer(model):
    return torch.optim.AdamW(model.parameters())

def step(model, batch=4, seq=64):
    x = torch.randn(batch, seq, 64, device=next(model.parameters()).device)
    model(x).square().mean().backward()
"""
_PARAMETER_BYTES = 4 * 5 * (2 * 64 * 256 + 256 + 64)


@pytest.fixture(name="script")
def _script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return path


def _of(script: Path, batch: int) -> dict[str, Any]:
    """What the Python functions take for a script."""
    defined = runpy.run_path(str(script))
    model = defined["model"]()
    return {"model": model, "step": lambda: defined["step"](model, batch=batch)}


def test_compare_measures_what_the_function_does(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch", "8", "--rounds", "1", "--policy", "recompute", "--policy", "aten.addmm"]
    assert cli.main(["compare", str(script), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    named = {"recompute": "recompute", "aten.addmm": ["aten.addmm"]}
    expected = actckpt.compare(**_of(script, 8), policies=named, rounds=1)
    names = ("name", "held_bytes", "peak_bytes", "same_bits", "blocks")
    assert [[row[name] for name in names] for row in found["rows"]] == [
        [getattr(row, name) for name in names] for row in expected.rows
    ]
    assert found["rounds"] == 1
    assert found["rows"][0]["samples_per_s"] == 8 / found["rows"][0]["seconds"]
    assert cli.main(["compare", str(script), *words]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == ["policy", "none", "recompute"]


def test_compare_has_a_plan_for_a_budget_beside_the_default(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(script), "--activation-budget", "60%", "--rounds=1", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == ["none", "recompute", "keep matmuls", "activation budget 60%"]
    assert rows["activation budget 60%"]["peak_bytes"] <= 0.6 * rows["none"]["peak_bytes"] + 1024


def test_compare_says_which_of_how_many_steps_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(messages, "_QUIET_SECONDS", 0.01)
    calls = script.with_name("calls")
    noted = f"    with open({str(calls)!r}, 'a') as calls:\n        calls.write('run\\n')\n    time.sleep(0.3)\n"
    script.write_text(f"import time\n{_SCRIPT}{noted}")
    assert cli.main(["compare", str(script), "--rounds=2", "--policy", "recompute", "--blocks", "1", "2"]) == 0
    num_steps = len(calls.read_text().splitlines())
    assert f"actckpt compare: step {num_steps} of {num_steps} ...\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["compare --rounds=1", "plan --activation-budget=60%", "estimate"])
def test_what_a_script_prints_is_not_in_the_json(words: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printing = _SCRIPT.replace("):\n", "):\n    print('loud')\n")
    script.write_text(f"{printing}\nprint('loud')\n")
    command, *options = words.split()
    assert cli.main([command, str(script), "--json", *options]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) and captured.err.count("loud\n") > 4


def test_compare_exits_with_1_where_bits_differ(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(_SCRIPT.replace("model(x)", "RUNS.append(1); model(x * len(RUNS))") + "RUNS = []\n")
    assert cli.main(["compare", str(script), "--rounds=1", "--policy", "recompute"]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_plan_makes_saves_and_shows_a_plan_that_runs(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = script.with_name("plan.json")
    assert cli.main(["plan", str(script), "--batch=8", "--activation-budget=50%", "--save", str(saved)]) == 0
    shown, plan = capsys.readouterr().out, actckpt.Plan.load(saved)
    assert plan.explain() in shown and plan.table() in shown
    given = _of(script, 8)
    plain, planned = actckpt.compare(**given, policies={"plan": plan}, rounds=1).rows
    assert planned.same_bits and planned.peak_bytes <= 0.5 * plain.peak_bytes + 1024
    assert cli.main(["explain", str(saved)]) == 0
    assert capsys.readouterr().out == shown
    assert cli.main(["compare", str(script), "--policy", str(saved), "--batch=8", "--rounds=1"]) == 0


def test_a_budget_counts_the_state_of_the_optimizer(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for content in (_SCRIPT, _SCRIPT.replace("def optimizer", "def unused")):
        script.write_text(content)
        assert cli.main(["plan", str(script), "--budget", "1GiB", "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert 2 * _PARAMETER_BYTES <= peaks[0] - peaks[1] <= 2.01 * _PARAMETER_BYTES


def test_a_budget_is_a_share_of_the_device_too(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = []
    for share in ("0.25", "1"):
        assert cli.main(["plan", str(script), "--budget", share, "--json"]) == 0
        budgets.append(json.loads(capsys.readouterr().out)["budget_bytes"])
    assert budgets[1] == 4 * budgets[0] > 2**30


@pytest.mark.parametrize("command", ["compare --rounds=1", "plan"])
def test_a_budget_that_nothing_fits_is_one_line_with_one_that_does(
    command: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), str(script)]
    assert cli.main([*words, "--activation-budget", "2KiB"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "fits into 2.00 KiB" in captured.err
    option, size = captured.err.rstrip(".\n").split()[-2:]
    assert option == "--activation-budget"
    assert cli.main([*words, option, size]) == 0


@pytest.mark.parametrize("command", ["compare", "plan", "estimate"])
def test_the_example_in_the_help_is_a_script(command: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    example = textwrap.dedent(capsys.readouterr().out.partition("For example:\n")[2])
    script.write_text(example.replace("1024, 16, 4096", "64, 4, 128").replace("1024", "64"))  # the same, and fast
    options = {"compare": "--rounds=1", "plan": "--activation-budget=60%", "estimate": "--policy=recompute"}
    assert cli.main([command, str(script), "--batch=1", "--seq=8", options[command]]) == 0
