"""The planner is pure: nothing of it imports torch."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_PACKAGE = Path(__file__).parents[3] / "actckpt"
_MODULES = sorted((_PACKAGE / "planner").glob("*.py"))
_MAY = {*sys.stdlib_module_names, "numpy", "scipy"}
#: For type checkers only, or when something is drawn.
_LATE = {"action.py": {"torch"}, "plot.py": {"matplotlib"}, "pictures.py": {"matplotlib"}}


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _reached(path: Path) -> set[Path]:
    """Return the modules of the package that a module imports, and those that these import."""
    found: set[Path] = set()
    left = [path]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            ours = [name for name in _imported(path) if name.split(".")[0] == "actckpt"]
            left += [(_PACKAGE.parent / name.replace(".", "/")).with_suffix(".py") for name in ours]
    return found


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.stem)
def test_a_module_imports_numpy_scipy_and_the_standard_library_only(path: Path) -> None:
    for module in _reached(path):
        others = {name.split(".")[0] for name in _imported(module)} - _MAY - {"actckpt"}
        assert others <= _LATE.get(module.name, set()), module


def test_the_planner_works_where_there_is_no_torch(
    table: dict[str, Any], run_without_torch: Callable[..., str]
) -> None:
    code = """
import json
from actckpt.planner import simulate, solve
costs = json.load(sys.stdin)
plan = solve(costs, budget=60)
assert plan.explain() and plan.table()
print(simulate(costs, plan).fits, "scipy" in sys.modules)
"""
    assert run_without_torch(code, table) == "True True\n"


def test_importing_the_planner_does_not_import_scipy_which_is_slow(run_without_torch: Callable[..., str]) -> None:
    assert run_without_torch("import actckpt.planner; print('scipy' in sys.modules)") == "False\n"
