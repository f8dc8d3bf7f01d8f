"""What a library prints while a plan is solved is not in the program's output."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import in_threads
from scipy import optimize
from test_plan_shown import _costs

from actckpt import planner


def _print_from_c(text: str) -> None:
    ctypes.CDLL(None).printf(b"%s\n", text.encode())


def test_what_the_solver_prints_goes_to_the_error_stream(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    milp, calls = optimize.milp, []

    def printing(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        _print_from_c("a line of HiGHS")
        if len(calls) == 5:
            raise OSError("in the middle")
        return milp(*args, **kwargs)

    monkeypatch.setattr(optimize, "milp", printing)
    _print_from_c("before")
    in_threads(lambda _: planner.solve(_costs(), budget="2GiB"), 4)
    with pytest.raises(OSError, match="in the middle"):
        planner.solve(_costs(), budget="2GiB")
    os.write(1, b"after\n")
    found = capfd.readouterr()
    assert found.out.split() == ["before", "after"] and found.err == "a line of HiGHS\n" * 5


@pytest.mark.parametrize("closed", ["1", "2", "1, 2"])
def test_a_process_without_such_streams_solves_too(closed: str, tmp_path: Path) -> None:
    marked = tmp_path / "done"
    code = f"import os; [os.close(each) for each in ({closed},)]\n"
    code += "from actckpt.planner.linear_program import stdout_as_stderr\nwith stdout_as_stderr(): value = 1\n"
    code += f"open({str(marked)!r}, 'w').close()\n"
    subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[3])
    assert marked.exists()
