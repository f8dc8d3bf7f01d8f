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


def _collected(nodeids: Sequence[str], seed: int, sample: int = 1) -> list[str]:
    shuffle = runpy.run_path(str(_FOLDER.parent / "tests/conftest.py"))["pytest_collection_modifyitems"]
    items = [
        SimpleNamespace(
            nodeid=nodeid,
            path=_FOLDER.parent / nodeid.partition("::")[0],
            get_closest_marker=lambda name, nodeid=nodeid: name == "soak" and "soak" in nodeid,
        )
        for nodeid in nodeids
    ]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    shuffle(items, SimpleNamespace(option=SimpleNamespace(seed=seed, sample=sample, device="cpu"), hook=hook))
    return [item.nodeid for item in items]


def test_a_seed_alone_decides_on_the_order_of_tests() -> None:
    nodeids = [f"tests/test_{name}.py::test_{i}" for name in ("a", "b", "c", "benchmarks") for i in range(5)]
    collected = _collected(nodeids, 1)
    assert collected == _collected(nodeids[::-1], 1) != _collected(nodeids, 2)
    assert _collected(nodeids[::3], 1) == [nodeid for nodeid in collected if nodeid in nodeids[::3]]
    files = [nodeid.partition("::")[0] for nodeid in collected]
    assert files == sorted(files, key=files.index) and files[0] == "tests/test_benchmarks.py"


def test_a_sample_has_cases_of_each_test_and_in_time_all_of_them() -> None:
    test, other = "tests/contract/test_a.py::test_many", "tests/unit/test_b.py::test_many"
    nodeids = [f"{name}[{i}]" for name in (test, other) for i in range(10)] + [
        f"{test}_times[soak]",
        f"{test}_times[1]",
    ]
    samples = [_collected(nodeids, seed, 4) for seed in range(40)]
    for nodeids_of_seed in samples:
        tests = [nodeid.partition("[")[0] for nodeid in nodeids_of_seed]
        assert tests.count(test) == 3 and tests.count(other) == 10
        assert tests.count(f"{test}_times") == 2  # a mark leaves out the other one
    assert set().union(*samples) == set(nodeids)
    assert samples[0] == [nodeid for nodeid in _collected(nodeids, 0) if nodeid in samples[0]]
