"""Plans for a memory budget: what to keep, recompute and offload. See docs/planning.md. Nothing here imports torch."""

import importlib
from typing import TYPE_CHECKING, Any

from actckpt._error_base import CostTableError, PlanInfeasibleError
from actckpt.planner.costs import BlockClass, CostTable, Segment, Value
from actckpt.planner.plans import Plan

if TYPE_CHECKING:
    from actckpt.planner.simulation import Simulation, Span, simulate
    from actckpt.planner.solving import solve

__all__ = [
    "BlockClass",
    "CostTable",
    "CostTableError",
    "Plan",
    "PlanInfeasibleError",
    "Segment",
    "Simulation",
    "Span",
    "Value",
    "simulate",
    "solve",
]


def __getattr__(name: str) -> Any:
    """Import the solver and the simulator once they are asked for: models that use no plan do not wait for them."""
    if name in ("Simulation", "Span", "simulate", "solve"):
        return getattr(importlib.import_module(f"{__name__}.{'solving' if name == 'solve' else 'simulation'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
