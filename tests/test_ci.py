"""What runs all that a change must pass: two suites at a time, and one that fails or takes too long is named."""

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

_FOLDER = Path(__file__).parents[1] / ".ci"
_WITH_STAGES = """
import json, pathlib, runpy, sys
run = runpy.run_path(sys.argv[1])
stages = [[run["Suite"](*suite) for suite in stage] for stage in json.loads(sys.argv[3])]
run["main"].__globals__.update(STAGES=stages, _LOGS=pathlib.Path(sys.argv[2]))
sys.exit(run["main"]())
"""
_Stages = Sequence[Sequence[tuple[str, float, str]]]


def _ran(folder: Path, stages: _Stages) -> tuple[int, str, dict[str, list[str]]]:
    """Return exit status, output, and the rows of the table without the names."""
    command = [sys.executable, "-c", _WITH_STAGES, str(_FOLDER / "suites.py"), str(folder), json.dumps(stages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    (header,) = (number for number, line in enumerate(lines) if line.startswith("suite "))
    return done.returncode, done.stdout, {line.split()[0]: line.split()[1:] for line in lines[header + 1 : -1]}


@pytest.mark.parametrize("command", [["bash", ".ci/run"], [".ci/run"]])
def test_it_starts_as_a_file_and_as_a_script_of_the_shell(tmp_path: Path, command: list[str]) -> None:
    shutil.copytree(_FOLDER, tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(".PHONY: build\nbuild:\n\techo compiled here\n\texit 3\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert not done.stderr and done.returncode == 1
    assert "compiled here\n" in done.stdout and done.stdout.endswith("; build: FAILED (2)\n")


def test_suites_of_a_stage_run_beside_each_other_and_stages_one_after_the_other(tmp_path: Path) -> None:
    def meets(name: str, other: str) -> str:
        return f"echo {name} speaks; cd {tmp_path}; touch {name}; until test -e {other}; do sleep 0.01; done"

    status, said, rows = _ran(
        tmp_path,
        [[("one", 1, meets("A", "B")), ("two", 1, meets("B", "A"))], [("three", 1, f"rm {tmp_path}/A {tmp_path}/B")]],
    )
    assert status == 0 and said.endswith("; all passed\n")
    assert "A speaks\n\n== one: passed\n" in said and "B speaks\n\n== two: passed\n" in said
    assert {name: row[0] for name, row in rows.items()} == dict.fromkeys(("one", "two", "three"), "passed")
    assert list(rows)[-1] == "three"


def test_a_suite_that_fails_is_named_and_no_other_stage_begins(tmp_path: Path) -> None:
    bad, good, late = ("bad", 1.0, "echo no luck >&2; exit 3"), ("good", 1.0, "true"), ("late", 1.0, "true")
    status, said, rows = _ran(tmp_path, [[bad, good], [late]])
    assert status == 1 and said.endswith("; bad: FAILED (3)\n")
    assert "no luck\n" in said and rows["good"][0] == "passed" and "late" not in said


def test_a_suite_far_over_its_share_fails_and_only_its_own_cpu_time_counts(tmp_path: Path) -> None:
    burns = f"{sys.executable} -c 'import time\nwhile time.process_time() < 1.5: pass'"
    stages = [[("slow", 0.003, burns), ("idle", 0.003, "sleep 1")], [("late", 0.003, "true")]]
    status, said, rows = _ran(tmp_path, stages)
    assert status == 1 and said.endswith("; slow: TOO LONG\n")
    assert rows["idle"][0] == rows["late"][0] == "passed"
    assert rows["slow"] == ["TOO", "LONG", rows["slow"][2], "0.0", "0.0"]


def _shuffled(nodeids: Sequence[str], seed: int) -> list[str]:
    shuffle = runpy.run_path(str(_FOLDER.parent / "tests/conftest.py"))["pytest_collection_modifyitems"]
    items = [SimpleNamespace(nodeid=nodeid, path=Path(nodeid.partition("::")[0])) for nodeid in nodeids]
    shuffle(items, SimpleNamespace(option=SimpleNamespace(seed=seed)))
    return [item.nodeid for item in items]


def test_a_seed_alone_decides_on_the_order_of_tests() -> None:
    nodeids = [f"tests/test_{name}.py::test_{i}" for name in ("a", "b", "c", "benchmarks") for i in range(5)]
    found = _shuffled(nodeids, 1)
    assert found == _shuffled(nodeids[::-1], 1) != _shuffled(nodeids, 2)
    assert _shuffled(nodeids[::3], 1) == [nodeid for nodeid in found if nodeid in nodeids[::3]]
    files = [nodeid.partition("::")[0] for nodeid in found]
    assert files == sorted(files, key=files.index) and files[0] == "tests/test_benchmarks.py"
