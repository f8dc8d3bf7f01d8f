"""mypy and pyright see the installed package, accept right calls and report wrong ones; run by `make types`.

Both run in another folder, so that they find the package where it is installed, as they do for its users.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent
_CALLS = ("right_calls.py", "wrong_calls.py")
_MIN_COMPLETENESS = 0.95

Report = dict[str, dict[int, str]]


def _run(tool: str, *arguments: str, folder: Path) -> str:
    """Return the output of a type checker of this environment; its exit code tells no more than that."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # pyright asks the first `python`
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PATH": paths}, capture_output=True, text=True)
    assert done.returncode in (0, 1), f"{tool} did not run: {done.stdout}{done.stderr}"
    return done.stdout


def _mypy(folder: Path) -> Report:
    report: Report = {name: {} for name in _CALLS}
    output = _run("mypy", "--strict", "--no-error-summary", *_CALLS, folder=folder)
    for name, line, message in re.findall(r"^(\w+\.py):(\d+): error: (.*)$", output, re.MULTILINE):
        report[name][int(line)] = message
    return report


def _pyright(folder: Path) -> Report:
    report: Report = {name: {} for name in _CALLS}
    for found in json.loads(_run("pyright", "--outputjson", *_CALLS, folder=folder))["generalDiagnostics"]:
        if found["severity"] == "error":
            report[Path(found["file"]).name][found["range"]["start"]["line"] + 1] = found["message"]
    return report


@pytest.fixture(scope="module", params=[_mypy, _pyright], ids=["mypy", "pyright"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The errors by file and line."""
    folder = tmp_path_factory.mktemp("calls")
    for name in _CALLS:
        shutil.copy(_FOLDER / name, folder)
    check: Callable[[Path], Report] = request.param
    return check(folder)


def test_every_right_call_is_accepted(report: Report) -> None:
    assert report["right_calls.py"] == {}


def test_every_wrong_call_and_no_other_line_is_reported(report: Report) -> None:
    lines = enumerate((_FOLDER / "wrong_calls.py").read_text().splitlines(), 1)
    wrong = {number for number, line in lines if line.endswith("# wrong")}
    assert len(wrong) >= 40
    reported = report["wrong_calls.py"]
    assert wrong - reported.keys() == set(), "not reported"
    assert {number: reported[number] for number in reported.keys() - wrong} == {}


def test_the_types_of_the_public_names_are_known(tmp_path: Path) -> None:
    output = _run("pyright", "--verifytypes", "actckpt", "--ignoreexternal", "--outputjson", folder=tmp_path)
    completeness = json.loads(output)["typeCompleteness"]
    unknown = [symbol["name"] for symbol in completeness["symbols"] if not symbol["isTypeKnown"]]
    print(f"types of {completeness['completenessScore']:.1%} of the public names are known, not those of {unknown}")
    assert completeness["completenessScore"] > _MIN_COMPLETENESS, unknown
