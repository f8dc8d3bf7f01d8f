"""The command line: what it prints and how it exits."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from actckpt import __main__, cli
from actckpt.errors import PlanInfeasibleError

_TOY_SIZES = {"steps": 2, "layers": 2, "dim": 16, "heads": 2, "seq": 16, "batch": 2}
TOY = [*(f"--{name}={value}" for name, value in _TOY_SIZES.items()), "--device=cpu", "--no-plot"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "COMMAND"),
        ("dmo", "'dmo'"),
        ("demo --steps 0", "--steps is 0"),
        ("demo --steps many", "--steps: 'many' is not a whole number"),
        ("demo --layers 1.5", "--layers: '1.5' is not a whole number"),
        ("demo --batch -4", "--batch is -4"),
        ("demo --dropout high", "--dropout: 'high' is not a number"),
        ("demo --dropout 1", "--dropout is 1.0"),
        ("demo --dim 100 --heads 3", "try --dim 102"),
        ("demo --seq 2000000000", "try --seq "),
        ("demo --methods torch-checkpoin", "Did you mean torch-checkpoint?"),
        ("demo --device abacus", "usable are auto, cpu"),
        ("demo --out /dev/null", "cannot be written"),
        ("demo --colour red", "--colour"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(words.split())
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("actckpt")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_help_documents_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["demo", "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in (*_TOY_SIZES, "dropout", "seed", "device", "methods", "out", "no-plot", "activation-budget"):
        assert f"--{option}" in text
    assert text.count("(default: ") == 11  # all but the last two
    assert "torch-checkpoint (recompute each block with torch.utils.checkpoint)" in text


def test_running_out_of_memory_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exhaust(demo: object) -> int:
        raise MemoryError("does not fit")

    monkeypatch.setattr("actckpt.demo.run.run_demo", exhaust)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["demo", *TOY, "--out", str(tmp_path)])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.splitlines() == ["actckpt demo: error: does not fit. See actckpt demo --help."]


def test_a_budget_that_nothing_fits_into_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def too_small(demo: object) -> int:
        raise PlanInfeasibleError("No plan fits into 1 B", 2.0)

    monkeypatch.setattr("actckpt.demo.run.run_demo", too_small)
    assert cli.main(["demo", *TOY, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "actckpt demo: No plan fits into 1 B Try --activation-budget 1KiB.\n"


def test_an_interrupt_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(demo: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("actckpt.demo.run.run_demo", interrupt)
    assert cli.main(["demo", *TOY, "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "actckpt: interrupted\n"


def test_module_entry_is_the_same_command() -> None:
    assert __main__.main is cli.main


def test_python_dash_m_runs_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "actckpt", "demo", *TOY, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Equal bit for bit" in done.stdout
    assert json.loads((tmp_path / "demo.json").read_text())["equal"] is True


@pytest.mark.parametrize("name", ["cli.py", "__main__.py", "demo/__init__.py", "demo/settings.py", "demo/methods.py"])
def test_what_help_needs_imports_nothing_heavy(name: str) -> None:
    tree = ast.parse((Path(cli.__file__).parent / name).read_text())
    late = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in late if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in late if isinstance(node, ast.ImportFrom)}
    assert not {module.split(".")[0] for module in names} & {"torch", "rich", "matplotlib", "numpy"}
