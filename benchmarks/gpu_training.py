"""A model under budgets on a device: peaks, times and what plans do. The rows of `gpu_budgets.py`."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import gpu_models
import gpu_offload
import torch
from gpu_models import Made, Sizes
from gpu_offload import milliseconds
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt
from actckpt._blocks.applied import applied_blocks
from actckpt._budget.bandwidth import flush
from actckpt._budget.running import Candidate
from actckpt._core import devices
from actckpt.comparison import _forwards as forwards_with

__all__ = ["Bench", "actions_of", "allocated", "plain", "planned", "ran", "smallest", "spread", "trained"]

#: Any budget that nothing fits into.
_NO_BUDGET = 1 << 20
#: Steps under a budget until its plan has run so often without being made again, and at most.
_MOST_STEPS = 48  # a race of five takes thirty


class _AsItIs:
    """Stands for a state that no step changes: each drops the gradients of the one before."""

    def put_back(self) -> None:
        """Leave everything as it is."""


def spread(smallest: int, largest: int, count: int) -> list[int]:
    """Return so many numbers evenly between two."""
    return [smallest + round((largest - smallest) * number / max(count - 1, 1)) for number in range(count)]


class Bench:
    """One model on the device, made when it is first used, its step, and what is known of it by now."""

    def __init__(self, name: str, sizes: Sizes, num_budgets: int) -> None:
        self.name, self.sizes, self.num_budgets = name, sizes, num_budgets
        self._made: Made | None = None
        self.plain_bytes = self.smallest_bytes = 0
        #: By the number of the budget.
        self.plans: dict[int, actckpt.Plan] = {}
        #: By what they are called in the file.
        self.other_plans: dict[str, actckpt.Plan] = {}
        self.ways: dict[str, Candidate] = {}

    @property
    def made(self) -> Made:
        """The model and what belongs to it."""
        if self._made is None:
            self._made = gpu_models.made(self.name, self.sizes, gpu_offload.device())
        return self._made

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        return self.made.model

    def forget(self) -> None:
        """Drop the model and all that knows it."""
        self._made = None
        self.ways.clear()

    def step(self) -> None:
        """Run forward and backward, as a training step does: the gradients of the last one are dropped first."""
        self.model.zero_grad(set_to_none=True)
        self.made.loss().backward()

    def budget(self, number: int) -> int:
        """Return one of the budgets, which are evenly between the smallest and the plain peak."""
        if not self.plain_bytes or not self.smallest_bytes:
            raise RuntimeError(f"{self.name}: no plain peak or no smallest budget, see those rows")
        return spread(self.smallest_bytes, self.plain_bytes, self.num_budgets)[number]

    def way(self, name: str, plan: actckpt.Plan | None = None, step: Callable[[], object] | None = None) -> Candidate:
        """Return a way to run the step: by a plan, or by a step of its own."""
        forwards = {} if plan is None else forwards_with(self.model, {"policy": plan})
        return Candidate(name, self.model, forwards, step or self.step, _AsItIs())  # type: ignore[arg-type]


def allocated() -> int:
    """Return what is allocated when all work is done, what was moved has left, and no cycle holds tensors."""
    gc.collect()
    flush(gpu_offload.device())
    return torch.accelerator.memory_allocated()


def ran(step: Callable[[], object]) -> dict[str, Any]:
    """Run a step; return its time, how long the host took to issue it, its peak and what waited in it."""
    devices.synchronize(gpu_offload.device())
    torch.accelerator.reset_peak_memory_stats()
    stall_s, host_s = actckpt.stats().stall_seconds, list[float]()

    def issued() -> None:
        began = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - began)

    step_ms = milliseconds(issued)
    return {
        "ms": step_ms,
        "host_ms": 1e3 * host_s[0],
        "peak_bytes": torch.accelerator.max_memory_allocated(),
        "stall_ms": 1e3 * (actckpt.stats().stall_seconds - stall_s),
    }


class _Names(TorchDispatchMode):
    """Takes down which operators of attention run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def plain(bench: Bench) -> dict[str, Any]:
    """Return peak and time of plain steps."""
    names = _Names()
    with names:
        bench.step()
    bench.step()
    allocated()  # lets go of the model before, which cycles hold
    steps = [ran(bench.step) for _ in range(4)]
    bench.plain_bytes = max(step["peak_bytes"] for step in steps)
    bench.model.zero_grad(set_to_none=True)
    return {
        "model": bench.made.kind,
        "parameters": sum(parameter.numel() for parameter in bench.model.parameters()),
        "attention": sorted(names.found),
        "fixed_bytes": allocated(),
        "peak_bytes": bench.plain_bytes,
        "ms": statistics.median(step["ms"] for step in steps),
        "steps": steps,
    }


def smallest(bench: Bench) -> dict[str, Any]:
    """Return the smallest budget, as the error for one that is too small tells it in training."""
    before = allocated()
    torch.accelerator.reset_peak_memory_stats()  # of plain training: with it the first step tells less
    actckpt.apply(bench.model, budget=_NO_BUDGET, on_infeasible="raise")
    try:
        for _ in range(3):
            bench.step()
    except actckpt.errors.PlanInfeasibleError as error:
        said = str(error)
        bench.smallest_bytes = int(error.smallest_bytes or 0)
    finally:
        actckpt.remove(bench.model)
        bench.model.zero_grad(set_to_none=True)
    if not bench.smallest_bytes:
        raise RuntimeError(f"{_NO_BUDGET} bytes were enough, or nothing told the smallest budget")
    of_plain = _quotient(bench.smallest_bytes, bench.plain_bytes)
    row = {"bytes": bench.smallest_bytes, "of_plain": of_plain, "said": said, "left_bytes": allocated() - before}
    gc.freeze()  # what was imported by now: each look for cycles would go through it
    return row


def _trained(bench: Bench, num_steps: int) -> list[dict[str, Any]]:
    """Run steps until one plan has run twice and so often; return them, with the number of plans made by then."""
    training = next(iter(applied_blocks(bench.model).values())).forward.together.training
    steps, num_plans, num_same, last = [], 0, 0, None
    while len(steps) < _MOST_STEPS and num_same < num_steps + 2:
        step = ran(bench.step)
        now = training.plan
        num_same = num_same + 1 if now is last and now is not None else int(now is not None)
        num_plans += now is not last
        last = now
        steps.append({**step, "plans_made": num_plans})
    return steps


def actions_of(plan: actckpt.Plan) -> dict[str, Any]:
    """Return how many values, of how many bytes, a plan keeps, recomputes and offloads; and blocks that it reruns."""
    counts, nbytes = Counter[str](), Counter[str]()
    for block, actions in zip(plan.costs.blocks, plan.actions, strict=True):
        for value in block.values:
            if value.needed:
                counts[actions[value.name].value] += 1
                nbytes[actions[value.name].value] += int(value.nbytes)
    return {"values": dict(counts), "bytes": dict(nbytes), "rerun_blocks": sum(plan.rerun)}


def _fitted(budget: float, steps: list[dict[str, Any]], num_steps: int, plan: actckpt.Plan) -> dict[str, Any]:
    """Return what steps under a budget showed, and what was predicted. The last ones ran the plan that stayed."""
    settled = steps[-num_steps:]
    peak = max(step["peak_bytes"] for step in settled)
    return {
        "budget_bytes": int(budget),
        "peak_bytes": peak,
        "fits": peak <= budget,
        "over_bytes": int(peak - budget),
        "of_budget": peak / budget,
        "predicted_peak_bytes": int(plan.peak_bytes),
        "peak_to_predicted": peak / plan.peak_bytes,
        "ms_in_training": statistics.median(step["ms"] for step in settled),
        "stall_ms": statistics.median(step["stall_ms"] for step in settled),
        "predicted_ratio_to_plain": _quotient(plan.step_seconds, plan.plain_seconds),
        "predicted_ms": 1e3 * plan.step_seconds,
        "chosen": plan.chosen,
        "actions": actions_of(plan),
        "links_bytes_per_s": [plan.costs.d2h_bytes_per_s, plan.costs.h2d_bytes_per_s],
        "over_in_first_steps_bytes": int(max(step["peak_bytes"] for step in steps) - budget),
        "steps": steps,
    }


def _quotient(a: float, b: float) -> float | None:
    return a / b if b else None


def _in_turns(bench: Bench, plan: actckpt.Plan, num_pairs: int) -> dict[str, Any]:
    """Return the time of steps under a plan over that of plain ones, in turns."""
    ours, theirs = bench.way("plan", plan), bench.way("plain")
    for each in (ours, ours, theirs):
        each.run()  # the first run of a structure is audited
    for _ in range(num_pairs):
        ours.time()
        theirs.time()
    medians = [1e3 * statistics.median(each.seconds) for each in (ours, theirs)]
    return {"ms": medians[0], "plain_ms": medians[1], "ratio_to_plain": _quotient(*medians)}


def trained(
    bench: Bench, budget: Callable[[], Any], num_steps: int, keep: Callable[[actckpt.Plan], object]
) -> dict[str, Any]:
    """Train under a budget; then time the plan that stayed, and see that nothing is left of it."""
    bench.model.zero_grad(set_to_none=True)
    given, before = budget(), allocated()
    actckpt.apply(bench.model, budget=given)
    try:
        steps = _trained(bench, num_steps)
        plan = actckpt.report(bench.model).plan
    finally:
        actckpt.remove(bench.model)
        bench.model.zero_grad(set_to_none=True)
    left = torch.accelerator.memory_allocated() - before
    if plan is None:
        raise RuntimeError(f"no plan was made in {len(steps)} steps: {steps}")
    keep(plan)
    is_size = isinstance(given, int)
    row = {"given": given, **_fitted(given if is_size else plan.budget_bytes, steps, num_steps, plan)}
    row |= {"left_at_once_bytes": left, "left_bytes": allocated() - before}
    return row | _in_turns(bench, plan, num_steps)


def planned(bench: Bench, name: str, budget: Callable[[], int], *, race: bool) -> dict[str, Any]:
    """Let `plan` find a plan with a step to try, and run it by `apply(policy=plan)`."""
    bench.model.zero_grad(set_to_none=True)
    before, began = allocated(), time.monotonic()
    plan = actckpt.plan(bench.step, model=bench.model, budget=budget(), race=race)
    seconds = time.monotonic() - began
    bench.other_plans[name] = plan
    left = allocated() - before
    actckpt.apply(bench.model, policy=plan)
    try:
        steps = [ran(bench.step) for _ in range(5)]
    finally:
        actckpt.remove(bench.model)
        bench.model.zero_grad(set_to_none=True)
    row = {"plan_seconds": seconds, **_fitted(budget(), steps, 3, plan), "left_by_plan_bytes": left}
    race_rows = [{"name": each.name, "fits": each.fits, "seconds": each.seconds} for each in plan.race]
    return row | {"left_bytes": allocated() - before, "race": race_rows} | _in_turns(bench, plan, 3)
