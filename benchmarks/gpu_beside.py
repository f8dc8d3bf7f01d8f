"""Plans beside what people choose by hand, in turns; beside plain gradients; and beside estimates."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_offload
import torch
from budgets import ratio
from gpu_offload import Part
from gpu_training import Bench, ran
from torch.utils import checkpoint as torch_checkpoint

import actckpt
from actckpt._budget.bandwidth import flush
from actckpt._budget.running import Candidate
from actckpt._budget.simple import NOTHING, simple_plans

__all__ = ["choices", "estimated", "same_gradients", "turn"]

_SIMPLE = (NOTHING, "recompute", "offload inputs", "offload", "keep attention", "keep matmuls")


def _checkpointed(bench: Bench, **options: Any) -> None:
    """Run a step with torch's checkpoint around each block."""
    for block in bench.made.blocks:
        block.forward = partial(torch_checkpoint.checkpoint, block.forward, use_reentrant=False, **options)
    try:
        bench.step()
    finally:
        for block in bench.made.blocks:
            del block.__dict__["forward"]


def _transformers_checkpointed(bench: Bench) -> None:
    model: Any = bench.model
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        bench.step()
    finally:
        model.gradient_checkpointing_disable()


#: Linear layers run `mm`, with a bias `addmm`.
KEPT_BY_TORCH = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
_KEEPS_MATMULS = partial(torch_checkpoint.create_selective_checkpoint_contexts, KEPT_BY_TORCH)
_TORCH: dict[str, Callable[[Bench], None]] = {
    "torch checkpoint": _checkpointed,
    "torch selective, keeps matmuls": partial(_checkpointed, context_fn=_KEEPS_MATMULS),
    "transformers checkpointing": _transformers_checkpointed,
}


def choices(bench: Bench, compared: list[int]) -> Iterator[Part]:
    """Yield a row per simple choice, ours and torch's, and per plan that is compared with them."""
    ways = {name: partial(_simple, bench, name) for name in _SIMPLE}
    for name, step in _TORCH.items():
        if name != "transformers checkpointing" or (bench.name == "llama" and bench.sizes.is_transformers):
            ways[name] = partial(bench.way, name, step=partial(step, bench))
    for number in compared:
        ways[f"budget {number + 1}"] = partial(_plan, bench, number)
    for name, make in ways.items():
        yield Part("choices", name, partial(choice, bench, name, make))


def _plan(bench: Bench, number: int) -> Candidate:
    return bench.way("plan", bench.plans[number])


def _simple(bench: Bench, name: str) -> Candidate:
    """Return one of our simple choices."""
    if not bench.plans:
        raise RuntimeError("no plan was made, and so no cost table: see the rows of the budgets")
    plan = max(bench.plans.values(), key=lambda each: each.costs.d2h_bytes_per_s)
    found = dict(simple_plans(plan.costs))
    if name not in found:
        raise RuntimeError(f"the cost table offers only {list(found)}; links {plan.costs.d2h_bytes_per_s} bytes/s")
    return bench.way(name, dataclasses.replace(found[name], blocks=plan.blocks, places=plan.places))


def choice(bench: Bench, name: str, make: Callable[[], Candidate]) -> dict[str, Any]:
    """Return the peak of a way to run the step, and let it take part in turns."""
    way = make()
    for _ in range(2):
        way.run()
    flush(gpu_offload.device())
    row = ran(way.run)
    way.peak_bytes = row["peak_bytes"]
    bench.ways[name] = way
    return row


def turn(bench: Bench, compared: list[int]) -> dict[str, Any]:
    """Time each way once more, in an order by chance; return what is known by now."""
    bench.step()  # fills the allocator's cache, which the last row has emptied
    names, failed = list(bench.ways), {}
    random.shuffle(names)
    for name in names:
        try:
            bench.ways[name].time()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            del bench.ways[name]
    row: dict[str, Any] = {
        "seconds": {name: way.seconds[-1] for name, way in bench.ways.items()},
        "by_now": {f"budget {number + 1}": _compared(bench, number) for number in compared},
    }
    return row | ({"failed": failed} if failed else {})


def _compared(bench: Bench, number: int) -> dict[str, Any]:
    """Return a plan beside simple choices: the best of ours that fits, and each of torch's."""
    ours, budget = bench.ways.get(f"budget {number + 1}"), bench.budget(number)
    if ours is None:
        return {"because": "this plan does not run, see the choices"}
    row: dict[str, Any] = {"budget_bytes": budget, "peak_bytes": ours.peak_bytes, "chosen": bench.plans[number].chosen}
    fitting = [way for name, way in bench.ways.items() if name in _SIMPLE and way.peak_bytes <= budget]
    if fitting:
        best = min(fitting, key=lambda way: statistics.median(way.seconds))
        row |= {"best_simple": best.name, "ratio_to_best_simple": ratio(ours, best)}
    others = {name: way for name, way in bench.ways.items() if name in _TORCH}
    row["to"] = {
        name: {"ratio": ratio(ours, way), "peak_bytes": way.peak_bytes, "fits": way.peak_bytes <= budget}
        for name, way in others.items()
    }
    return row


def _gradients(bench: Bench, run: Callable[[], object]) -> dict[str, torch.Tensor]:
    run()
    found = {name: tensor.grad for name, tensor in bench.model.named_parameters() if tensor.grad is not None}
    bench.model.zero_grad(set_to_none=True)
    return found


def _differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest difference of each gradient that is not the same, bit for bit."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())}")
    return {
        name: float((found[name].float() - expected[name].float()).abs().max())
        for name in expected
        if not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
    }


def same_gradients(bench: Bench, find: Callable[[], actckpt.Plan]) -> dict[str, Any]:
    """Compare gradients under a plan with plain ones; with deterministic algorithms where two plain steps differ."""
    plan, row = find(), dict[str, Any]()
    for mode in ("as it is", "deterministic"):
        torch.use_deterministic_algorithms(mode == "deterministic")
        try:
            expected = _gradients(bench, bench.step)
            again = _differing(_gradients(bench, bench.step), expected)
            way = bench.way("plan", plan)
            differing = [_differing(_gradients(bench, way.run), expected) for _ in range(2)]
        finally:
            torch.use_deterministic_algorithms(False)
        row[mode] = {
            "plain_twice_differs": len(again),
            "largest_of_plain": max(again.values(), default=0.0),
            "plan_differs": [len(each) for each in differing],
            "largest_of_plan": [max(each.values(), default=0.0) for each in differing],
        }
        row["same_bits"] = not any(differing)
        if not again:
            break
    if any(differing):
        row["failed"] = f"gradients differ from plain ones ({mode}): {differing}"
    return row


def estimated(bench: Bench) -> dict[str, Any]:
    """Return what `estimate` says of the device beside what was measured."""
    name = gpu_offload.device_name()
    target = "h200" if "H200" in name else "h100"
    policies = {"recompute": "recompute"}
    found = actckpt.estimate(bench.step, model=bench.model, target=target, policies=policies)
    row: dict[str, Any] = {"target": target, "device": name, "notes": found.notes}
    measured = {"none": bench.ways.get(NOTHING), "recompute": bench.ways.get("recompute")}
    for policy, way in measured.items():
        guess = found[policy]
        row[policy] = {"estimated_peak_bytes": guess.total_peak_bytes, "estimated_ms": 1e3 * guess.seconds}
        if way is not None:
            row[policy] |= {"peak_bytes": way.peak_bytes, "to_peak": guess.total_peak_bytes / way.peak_bytes}
            row[policy]["peak_within_5_percent"] = abs(row[policy]["to_peak"] - 1) <= 0.05
        if way is not None and way.seconds:
            row[policy]["ms"] = 1e3 * statistics.median(way.seconds)
            row[policy]["to_ms"] = row[policy]["estimated_ms"] / row[policy]["ms"]
    return row
