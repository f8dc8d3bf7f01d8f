"""The command line: what it prints and how it exits."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actckpt import cli
from actckpt._commands import messages

_TOY_SIZES = {"steps": 2, "layers": 2, "dim": 16, "heads": 2, "seq": 16, "batch": 2}
TOY = [*(f"--{name}={value}" for name, value in _TOY_SIZES.items()), "--device=cpu", "--no-plot"]


def test_help_documents_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["demo", "--help"])
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in (*_TOY_SIZES, "dropout", "seed", "device", "out", "no-plot", "activation-budget"):
        assert f"--{option}" in text
    assert text.count("(default: ") == 11  # all but two


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--no-measure"],  # printed line by line
        ["doctor", "--no-measure", "--json"],  # left in the buffer
        ["demo", *TOY, "--activation-budget", "--out", "."],
    ],
    ids=" ".join,
)
def test_a_reader_that_goes_away_is_no_traceback_and_files_are_written(words: list[str], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, "-m", "actckpt", *words]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, cwd=tmp_path, env=environment
    )
    os.close(write)
    assert done.returncode == cli.EXIT_BROKEN_PIPE
    assert "Traceback" not in done.stderr and (done.stderr == "" or words[0] == "demo")
    assert words[0] == "doctor" or json.loads((tmp_path / "demo.json").read_text())["equal"] is True


def test_json_of_the_demo_and_of_the_doctor_is_all_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *TOY, "--json", "--activation-budget", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out == (tmp_path / "demo.json").read_text()
    assert list(json.loads(out)["results"]) == ["plain", "torch checkpoint", "recompute", "keep matmuls"]
    assert cli.main(["doctor", "--no-measure", "--json"]) == 0
    assert {"actckpt", "torch", "spill folder"} <= set(json.loads(capsys.readouterr().out))


def test_what_takes_longer_says_what_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def wait_for(line: str) -> None:
        deadline = time.monotonic() + 60
        while line not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said.extend(capsys.readouterr().err.splitlines())

    monkeypatch.setattr(messages, "_QUIET_SECONDS", 0.05)
    with messages.slow("actckpt plan", "thinking") as say:
        wait_for("actckpt plan: thinking ...")
        say("writing")
        wait_for("actckpt plan: writing ...")
    monkeypatch.setattr(messages, "_QUIET_SECONDS", 60)
    with messages.slow("actckpt plan", "at once"):
        pass
    said.extend(capsys.readouterr().err.splitlines())
    assert said == ["actckpt plan: thinking ...", "actckpt plan: writing ..."]


def test_keywords_in_errors_are_written_as_options() -> None:
    said = "activation_budget='4' and budget=24; --budget='3' and my_budget=2 stay"
    assert messages.as_options(said) == "--activation-budget '4' and --budget 24; --budget='3' and my_budget=2 stay"


def test_an_interrupt_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*args: object, **kwargs: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("actckpt.demo.run", interrupt)
    assert cli.main(["demo", *TOY, "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "actckpt: interrupted\n"


@pytest.mark.parametrize(
    "name",
    [
        "cli.py",
        "__main__.py",
        *(f"_commands/{name}.py" for name in ("compare", "demo", "estimate", "messages", "plan", "running", "scripts")),
    ],
)
def test_what_help_needs_imports_nothing_heavy(name: str) -> None:
    tree = ast.parse((Path(cli.__file__).parent / name).read_text())
    late = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in late if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in late if isinstance(node, ast.ImportFrom)}
    assert not {module.split(".")[0] for module in names} & {"torch", "rich", "matplotlib", "numpy"}
