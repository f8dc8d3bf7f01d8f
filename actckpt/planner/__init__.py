"""Plans for a memory budget: what to keep, recompute and offload. See docs/planning.md. Nothing here imports torch."""

from actckpt._error_base import CostTableError, PlanInfeasibleError
from actckpt.planner.costs import BlockClass, CostTable, Segment, Value
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import Simulation, simulate
from actckpt.planner.solving import solve

__all__ = [
    "BlockClass",
    "CostTable",
    "CostTableError",
    "Plan",
    "PlanInfeasibleError",
    "Segment",
    "Simulation",
    "Value",
    "simulate",
    "solve",
]
