"""The planner is pure: it needs no torch, and scipy only to solve."""

from collections.abc import Callable
from typing import Any

#: All modules are imported, also those that only draw or write pages.
_PLAN = """
import importlib, json, pkgutil
from actckpt import planner
for module in pkgutil.iter_modules(planner.__path__):
    importlib.import_module(f"actckpt.planner.{module.name}")
print("scipy" in sys.modules, "matplotlib" in sys.modules)
costs = json.load(sys.stdin)
plan = planner.solve(costs, budget=60)
assert plan.explain() and plan.table()
print(planner.simulate(costs, plan).fits, "scipy" in sys.modules)
"""


def test_the_planner_works_where_there_is_no_torch_and_importing_it_imports_nothing_slow(
    table: dict[str, Any], run_without_torch: Callable[..., str]
) -> None:
    assert run_without_torch(_PLAN, table) == "False False\nTrue True\n"
