"""Methods side by side: one model, a copy of its modules for each method, the same parameters."""

from __future__ import annotations

import gc
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from torch import Tensor, nn

import actckpt
from gpu_parts.methods import PLAIN, Method
from gpu_parts.models import Built, Sizes, build, shared_copy
from gpu_parts.rows import Row, Rows, medians

__all__ = ["Bench", "actions_of", "compare_gradients", "differing"]

#: Any budget that nothing fits into.
_NO_BUDGET = 1 << 20
#: Steps under a budget until all trials are done, at most; and steps without a change afterwards.
_MOST_STEPS, _UNCHANGED = 48, 3
#: The first steps of a structure are audited, which takes memory.
_WARM_UPS = 3
#: Steps that are measured for a row, and the least milliseconds of a turn: energy counters are coarse.
_STEPS, _TURN_MS = 3, 100.0


class _Training:
    """A method on its copy of the model."""

    def __init__(self, built: Built, method: Method, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.method = shared_copy(built.model), method
        self._loss, self._optimizer = built.loss, optimizer
        self._context = method.prepare(self.model, built.blocks(self.model)) or nullcontext
        self.repeats = 1

    def step(self) -> None:
        """Run forward and backward, then the optimizer. The gradients of the last step are dropped first."""
        self.model.zero_grad(set_to_none=True)
        with self._context():
            loss = self._loss(self.model)
            if self.method.spans_backward:
                loss.backward()
        if not self.method.spans_backward:
            loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()


class Bench:
    """A model of some size, and the methods that train it."""

    def __init__(self, rows: Rows, sizes: Sizes, name: str, plans: Path, *, trains: bool = False) -> None:
        self.rows, self.sizes, self.name, self._plans = rows, sizes, name, plans
        self.built = build(sizes, rows.machine.device)
        #: States in the parameters' dtype; fused, it needs no memory beside them.
        fused = {} if rows.machine.is_rehearsal else {"fused": True}
        self._optimizer = torch.optim.AdamW(self.built.model.parameters(), **fused) if trains else None
        self.trainings: dict[str, _Training] = {}
        self.plain_bytes = self.smallest_bytes = 0

    def forget(self) -> None:
        """Drop all methods, and the gradients."""
        self.trainings.clear()
        self.built.model.zero_grad(set_to_none=True)
        gc.collect()

    def run(self, methods: Sequence[Method], *, most_steps: int = _MOST_STEPS, is_capped: bool = False) -> None:
        """Write a row per method: its first steps, and what a settled one takes.

        Args:
            methods: in the order of their rows.
            most_steps: under a budget until its trials are done.
            is_capped: the process may not allocate more than a budget.
        """
        for method in methods:
            if method.budget_share is not None and not self.smallest_bytes:
                self._measure("smallest budget", self._smallest)
            measure = self._first_capped if is_capped else self._first
            self._measure(method.name, partial(measure, method, most_steps))

    def rescue(self, method: Method) -> None:
        """Write a row per share of the peak that a process may allocate: whether a step ends, and what ran again."""
        for share in (1.0, 0.98, 0.95):
            self._measure(f"capped at {share} of its peak, {method.name}", partial(self._rescued, method, share))

    def _measure(self, name: str, measure: Callable[[], Row], **facts: Any) -> Row | None:
        return self.rows.measure(f"{name}{self._suffix()}", measure, **facts)

    def _suffix(self) -> str:
        return "" if self.name == "" else f", {self.name}"

    def _rescued(self, method: Method, share: float) -> Row:
        training = _Training(self.built, method, self._optimizer)
        peak = max(self.rows.run(training.step)["peak_allocated_bytes"] for _ in range(3))
        before = actckpt.stats().rescued_recomputations
        with self.rows.machine.capped(int(share * peak)):
            try:
                row = self.rows.run(training.step)
            except torch.OutOfMemoryError as error:
                row = {"out_of_memory": str(error).splitlines()[0]}
        return {**row, "uncapped_peak_bytes": peak, "rescued": actckpt.stats().rescued_recomputations - before}

    def _first_capped(self, method: Method, most_steps: int) -> Row:
        with self.rows.machine.capped(int(self.budget(method))):
            return self._first(method, most_steps)

    def _first(self, method: Method, most_steps: int) -> Row:
        training, facts = _Training(self.built, method, self._optimizer), dict[str, Any]()
        num_graphs = _num_compiled_graphs()
        if method.budget is not None or method.budget_share is not None:
            facts = self._settle(training, self.budget(method), most_steps)
        else:
            for _ in range(_WARM_UPS):
                training.step()
        actckpt.reset_stats()
        row = medians(self.rows.run(training.step) for _ in range(_STEPS))
        moved = actckpt.stats().offloaded_bytes // _STEPS
        if method is PLAIN:
            self.plain_bytes = row["peak_allocated_bytes"]
            facts = self._about()
        training.repeats = min(4, max(1, round(_TURN_MS / max(row["device_ms"], row["host_ms"], 1.0))))
        self.trainings[method.name] = training
        if method.is_compiled:
            facts["compiled_graphs"] = _num_compiled_graphs() - num_graphs
            if not facts["compiled_graphs"]:
                raise RuntimeError("nothing was compiled")
        if "budget_bytes" in facts:
            facts |= {"fits": row["peak_allocated_bytes"] <= facts["budget_bytes"]}
        return {**facts, **row, "moved_bytes": moved}

    def _about(self) -> Row:
        num_parameters = sum(parameter.numel() for parameter in self.built.model.parameters())
        return {"model": self.built.kind, "parameters": num_parameters, "sizes": self.sizes._asdict()}

    def budget(self, method: Method) -> int | str:
        """Return the budget of a method."""
        if method.budget is not None:
            return method.budget
        share = method.budget_share or 0.0
        if not self.plain_bytes or not self.smallest_bytes:
            raise RuntimeError("no plain peak or no smallest budget, see those rows")
        return round(self.smallest_bytes + share * (self.plain_bytes - self.smallest_bytes))

    def _smallest(self) -> Row:
        training = _Training(self.built, PLAIN, self._optimizer)
        torch.accelerator.reset_peak_memory_stats()
        actckpt.apply(training.model, budget=_NO_BUDGET, optimizer=self._optimizer, on_infeasible="raise")
        try:
            for _ in range(4):
                training.step()
        except actckpt.errors.PlanInfeasibleError as error:
            self.smallest_bytes = int(error.smallest_bytes or 0)
        if not self.smallest_bytes:
            raise RuntimeError(f"{_NO_BUDGET} bytes were enough, or nothing gave the smallest budget")
        return {"bytes": self.smallest_bytes, "of_plain": self.smallest_bytes / max(self.plain_bytes, 1)}

    def _settle(self, training: _Training, budget: int | str, most_steps: int) -> Row:
        """Train under a budget until the trials are done; save the plan."""
        races = not self.rows.machine.is_rehearsal  # there all steps take no time
        actckpt.apply(training.model, budget=budget, optimizer=self._optimizer, race=races)
        peaks, plan, num_unchanged = [], None, 0
        while len(peaks) < most_steps and num_unchanged < _UNCHANGED:
            peaks.append(self.rows.run(training.step)["peak_allocated_bytes"])
            report = actckpt.report(training.model)
            is_same = report.plan is plan and plan is not None and report.race_steps_left == 0
            num_unchanged, plan = num_unchanged + 1 if is_same else 0, report.plan
        if plan is None:
            raise RuntimeError(f"no plan was made in {len(peaks)} steps")
        return {
            "budget": budget,
            "budget_bytes": int(plan.budget_bytes) if isinstance(budget, str) else budget,
            "first_steps_peak_bytes": peaks,
            "is_settled": num_unchanged == _UNCHANGED,
            "plan": self._saved(training, plan),
            "predicted_peak_bytes": int(plan.peak_bytes),
            "predicted_ratio_to_plain": plan.step_seconds / plan.plain_seconds if plan.plain_seconds else None,
            "chosen": plan.chosen,
            "actions": actions_of(plan),
        }

    def _saved(self, training: _Training, plan: actckpt.Plan) -> str:
        """Write a plan with its costs, and a line that says for which model it is."""
        self._plans.mkdir(parents=True, exist_ok=True)
        name = f"{self.rows.part}, {training.method.name}{self._suffix()}.json"
        plan.save(self._plans / name)
        line = {"plan": name, "sizes": self.sizes._asdict(), "is_compiled": training.method.is_compiled}
        with (self._plans / "index.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return name

    def capture(self) -> None:
        """Write a row per method that ran: its step in a CUDA graph, where the device has them."""
        for name, training in self.trainings.items():
            self._measure(f"captured, {name}", partial(self._captured, training))

    def _captured(self, training: _Training) -> Row:
        if training.method.budget_share is not None:  # a budget measures steps, which a graph cannot
            plan = actckpt.report(training.model).plan
            actckpt.remove(training.model)
            actckpt.apply(training.model, policy=plan)
        step, captured_bytes = _graph_of(training.step, self.rows.machine.device)
        row = medians(self.rows.run(step) for _ in range(_STEPS))
        kept = actckpt.stats().kept_capturing
        return {**row, "captured_peak_bytes": captured_bytes, "kept_capturing": kept}

    def turns(self, rounds: int) -> None:
        """Time all methods in turns, in an order by chance; at the end their ratios to the plain step of a round.

        A step takes as long as the longer one of host and device.
        """
        times: dict[str, list[float | None]] = {name: [] for name in self.trainings}
        for number in range(1, rounds + 1):
            if not self.trainings:
                return
            next(iter(self.trainings.values())).step()  # fills the allocator's cache
            for name in random.sample(list(self.trainings), len(self.trainings)):
                training = self.trainings[name]
                measure = partial(self.rows.run, training.step, training.repeats)
                row = self.rows.measure(f"round {number}, {name}{self._suffix()}", measure, empties_caches=False)
                times[name].append(None if row is None else max(row["host_ms"], row["device_ms"]))
        self._measure("ratios to plain", partial(self._ratios, times))

    def _ratios(self, times: dict[str, list[float | None]]) -> Row:
        found: Row = {}
        for name, column in times.items():
            pairs = [(a, b) for a, b in zip(column, times[PLAIN.name], strict=True) if a is not None and b]
            if pairs:
                ratios = sorted(a / b for a, b in pairs)
                low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
                found[name] = {"median": statistics.median(ratios), "quartiles": [low, high], "rounds": len(ratios)}
        return found


def _graph_of(step: Callable[[], None], device: torch.device) -> tuple[Callable[[], None], int | None]:
    """Return the replay of a step as a CUDA graph, and its peak; the step itself where the device has no graphs."""
    module = torch.get_device_module(device)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(_WARM_UPS):
            step()
    torch.accelerator.current_stream().wait_stream(side)
    if not hasattr(module, "CUDAGraph"):
        return step, None
    graph = module.CUDAGraph()
    torch.accelerator.reset_peak_memory_stats()
    with module.graph(graph):
        step()
    return graph.replay, torch.accelerator.max_memory_allocated()


def _num_compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def actions_of(plan: actckpt.Plan) -> Row:
    """Return how many values, of how many bytes, a plan keeps, recomputes and offloads; and blocks that it reruns."""
    counts, nbytes = Counter[str](), Counter[str]()
    for block, actions in zip(plan.costs.blocks, plan.actions, strict=True):
        for value in block.values:
            if value.needed:
                counts[actions[value.name].value] += 1
                nbytes[actions[value.name].value] += int(value.nbytes)
    return {"values": dict(counts), "bytes": dict(nbytes), "rerun_blocks": sum(plan.rerun)}


def _gradients(built: Built, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    built.loss(model).backward()
    found = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def differing(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each gradient that does not have the same bits."""
    if gradients.keys() != expected.keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(gradients.keys() ^ expected.keys())}")
    return {
        name: float((gradients[name].float() - expected[name].float()).abs().max())
        for name in expected
        if not torch.equal(gradients[name].view(torch.uint8), expected[name].view(torch.uint8))
    }


def compare_gradients(rows: Rows, plans: Path, compiler: Any) -> None:
    """Write a row per saved plan: its gradients beside plain ones, with deterministic kernels."""
    index = plans / "index.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()] if index.exists() else []
    latest = {line["plan"]: line for line in lines}  # a part may have run before
    for sizes, group in _by_sizes(list(latest.values())):
        built = build(sizes, rows.machine.device)
        for is_compiled in (False, True):
            plain: dict[str, Tensor] = {}
            for line in (line for line in group if line["is_compiled"] == is_compiled):
                copy = partial(_copy, built, compiler if is_compiled else None)
                measure = partial(_compared, built, copy, plans / line["plan"], plain)
                rows.measure(f"gradients, {line['plan'].removesuffix('.json')}", measure)


def _by_sizes(lines: list[Row]) -> Iterator[tuple[Sizes, list[Row]]]:
    for sizes in dict.fromkeys(Sizes(**line["sizes"]) for line in lines):
        yield sizes, [line for line in lines if Sizes(**line["sizes"]) == sizes]


def _copy(built: Built, compiler: Any) -> nn.Module:
    model = shared_copy(built.model)
    for block in built.blocks(model) if compiler is not None else ():
        block.compile(backend=compiler)
    return model


def _compared(built: Built, copy: Callable[[], nn.Module], path: Path, plain: dict[str, Tensor]) -> Row:
    """Compare, and keep plain gradients for the next plan."""
    torch.use_deterministic_algorithms(True)
    try:
        if not plain:
            plain.update(_gradients(built, copy()))
        model = copy()
        actckpt.apply(model, policy=actckpt.Plan.load(path))
        found = [differing(_gradients(built, model), plain) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    row: Row = {"same_bits": not any(found), "largest": [max(each.values(), default=0.0) for each in found]}
    return row | ({} if row["same_bits"] else {"failed": f"gradients differ from plain ones: {found}"})
