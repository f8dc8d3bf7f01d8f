"""`actckpt estimate script.py`: memory and time of a step on a device, and the largest size that fits."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actckpt._commands.messages import number, slow
from actckpt._commands.running import budget_of
from actckpt._commands.scripts import FORM, Script, add_policies, add_sizes, in_one_line, policies_of, sizes_of

__all__ = ["add_estimate"]

_SEQUENCE_TOLERANCE = 0.005
#: A torch warning for models that copy their layers (`TransformerEncoder`): each copy reads the tensor's address.
_COPIES = "Accessing the data pointer of FakeTensor is deprecated"

_EPILOG = f"""\
All functions of the script are called on tensors without bytes: devices that they name are replaced, and nothing is
allocated. {FORM}"""


def add_estimate(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "estimate",
        help="say what a training step would hold and take on a device that is not here, or the largest that fits",
        description="Say what a training step would hold and take on a device, per policy, without running it.\n"
        "Exit status: 0 estimated, 1 nothing fits the budget, 2 bad arguments.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("file", type=Path, metavar="SCRIPT", help="a Python file, see below")
    option("--target", default="h100", metavar="NAME", help="the device: h100 (default), h200, a100, b200, ...")
    option("--flops", type=number, metavar="F", help="its operations per second on 16-bit numbers: 989e12")
    option("--bandwidth", type=number, metavar="B", help="bytes per second of its memory: 3.35e12")
    option("--link", type=number, metavar="B", help="bytes per second to the memory of the host, one way: 64e9")
    add_sizes(parser)
    add_policies(parser, "recompute, keep matmuls, offload")
    option("--find", choices=("batch", "seq"), help="find the largest one that fits the budget")
    option(
        "--budget",
        metavar="SIZE",
        help="the fastest plan that fits, too: most memory at any time: 70GiB, a share of the target's memory (0.9), "
        "or auto; with --find the limit of all policies (default: auto, the target's memory less 5 %%)",
    )
    option("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run, parser=parser)


@in_one_line
def _run(args: argparse.Namespace) -> int:
    with slow("actckpt estimate", "making the model and running a first step") as say:
        command = _Command(args, say)
        with command.prepared():
            return command.find() if args.find else command.estimate()


class _Command:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        import torch

        from actckpt._budget.sizes import budget_bytes
        from actckpt._core.simulated import simulating
        from actckpt.comparison import named_policies

        self._args, self._say, self._sizes = args, say, sizes_of(args)
        if args.find is not None and (size := getattr(args, args.find)) is not None:
            raise ValueError(
                f"--{args.find} {size} beside --find {args.find}, which looks for it. Leave one of them out."
            )
        self._target = _target(args)
        self._policies = named_policies(policies_of(args), "--policy", offloads=not self._target.is_cpu)
        self._tolerance = _SEQUENCE_TOLERANCE if args.find == "seq" else 0.0
        if args.find is not None:
            with simulating(lambda: 0.0, self._target.memory_bytes):
                limit = budget_of(args).get("budget", "auto")
                self._budget = int(budget_bytes(limit, torch.device("cpu"), held_bytes=0.0))
        elif args.budget is not None:
            self._policies[f"budget {args.budget}"] = budget_of(args)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Load the script, make its model and run a first step, all on fakes."""
        from actckpt._core.steps import Step
        from actckpt._estimate.estimating import Stepper, explained
        from actckpt._estimate.fakes import Fakes

        with Fakes(self._target) as fakes:
            self._script = Script(self._args.file)
            with explained(None), warnings.catch_warnings():
                warnings.filterwarnings("ignore", _COPIES)
                self._model = self._script.model()
                optimizers = self._script.optimizers(self._model, "estimate")
            self._stepper = Stepper(fakes, self._target, self._model, optimizers)
            with self._stepper:
                self._stepper.warm_up(Step(self._step(), "estimate", self._model))
                yield

    def _step(self, **sizes: int) -> Callable[[], object]:
        """Return the step at the sizes of the command line, or at others."""
        looked_for = {} if self._args.find is None else {self._args.find: 1}
        return self._script.step(self._model, looked_for | self._sizes | sizes)

    def _options(self) -> dict[str, dict[str, Any]]:
        """Return keywords of `apply` by policy. The script may have defined operators that they name."""
        from actckpt.estimation import checked_options

        blocks = self._args.blocks
        return {name: checked_options(policy, blocks, f"--policy {name}") for name, policy in self._policies.items()}

    def estimate(self) -> int:
        """Print the estimate of one size."""
        from actckpt.estimation import estimate_with

        estimate = estimate_with(self._stepper, self._step(), self._target, self._options(), self._say)
        print(json.dumps(estimate.as_dict(), indent=1) if self._args.json else estimate.table())
        return 0

    def find(self) -> int:
        """Print the largest size that fits, per policy."""
        from actckpt.errors import BlocksError, PlanInfeasibleError

        rows = [self._largest(name, options) for name, options in {"none": None, **self._options()}.items()]
        note = ""
        if self._args.policy is None:
            try:
                rows.append(self._largest_planned())
            except (BlocksError, PlanInfeasibleError) as error:
                note = f"No row for a budget: {error}"
        if self._args.json:
            print(json.dumps({"find": self._args.find, "budget_bytes": self._budget, "rows": rows}, indent=1))
        else:
            print(self._table(rows, note))
        return 0 if any(row["size"] for row in rows) else 1

    def _largest(self, name: str, options: dict[str, Any] | None) -> dict[str, Any]:
        figures_by_size: dict[int, Any] = {}

        def peak(step: Callable[[], object], size: int) -> int:
            figures_by_size[size] = self._stepper.run(step, options)
            return int(figures_by_size[size].total_peak_bytes)

        size = self._searched(name, peak)
        return _row(name, size, figures_by_size[size or 1])

    def _largest_planned(self) -> dict[str, Any]:
        """Return the row of the largest size for which a plan fits; one per cent beyond a first guess is not tried."""
        from actckpt.errors import PlanInfeasibleError

        guess = self._searched("budget", lambda step, _: self._stepper.smallest_budget(step, self._args.blocks))
        size, end, row = 0, 2 + int(1.01 * guess), None
        middle = max(guess, 1)
        while end - size > 1 + self._tolerance * size:
            larger = None
            with contextlib.suppress(PlanInfeasibleError):
                larger = self._planned(middle, self._budget)
            if larger is not None and larger["total_peak_bytes"] <= self._budget:
                size, row = middle, larger
            else:
                end = middle
            middle = (size + end) // 2
        if row is None:
            least = self._stepper.smallest_budget(self._step(**{self._args.find: 1}), self._args.blocks)
            row = {**self._planned(1, least), "size": 0}
        return row

    def _planned(self, size: int, budget: int) -> dict[str, Any]:
        self._say(f"budget, {self._args.find} {size}")
        step = self._step(**{self._args.find: size})
        plan = self._stepper.planned(step, {"budget": budget, "blocks": self._args.blocks}, "--budget")
        return _row("budget", size, self._stepper.run(step, {"policy": plan}))

    def _searched(self, name: str, peak: Callable[[Callable[[], object], int], int]) -> int:
        """Return the largest size whose peak, of a step of that size, is within the limit."""
        from actckpt._estimate.largest import largest_that_fits

        def peak_of(size: int) -> int:
            self._say(f"{name}, {self._args.find} {size}")
            return peak(self._step(**{self._args.find: size}), size)

        return largest_that_fits(peak_of, self._budget, tolerance=self._tolerance)

    def _table(self, rows: list[dict[str, Any]], note: str) -> str:
        from actckpt._text.sizes import format_bytes, format_seconds
        from actckpt._text.tables import aligned
        from actckpt.estimation import ERROR_OF_SECONDS, NO_OPTIMIZER

        lines = [("policy", f"largest {self._args.find}", "all", "host", "step", f"step / {self._args.find}")]
        for row in rows:
            size, each = str(row["size"] or "not even 1"), row["seconds"] / (row["size"] or 1)
            seconds = format_seconds(row["seconds"]), format_seconds(each)
            sizes = format_bytes(row["total_peak_bytes"]), format_bytes(row["host_bytes"])
            lines.append((row["name"], size, *sizes, *seconds))
        budget, no_optimizer = format_bytes(self._budget), "" if self._stepper.runs_optimizer else NO_OPTIMIZER
        limits = f"Estimated for {self._target.name} within {budget}; the host's memory has no limit."
        return "\n".join(filter(None, [aligned(lines, left=1), limits, ERROR_OF_SECONDS, no_optimizer, note]))


def _row(name: str, size: int, figures: Any) -> dict[str, Any]:
    seconds = figures.busy_seconds + figures.stall_seconds
    sizes = {"total_peak_bytes": figures.total_peak_bytes, "host_bytes": figures.host_bytes}
    return {"name": name, "size": size, **sizes, "seconds": seconds}


def _target(args: argparse.Namespace) -> Any:
    from actckpt._estimate.targets import named_target

    rates = {"flops_per_s": args.flops, "memory_bytes_per_s": args.bandwidth, "link_bytes_per_s": args.link}
    changes = {name: rate for name, rate in rates.items() if rate is not None}
    return dataclasses.replace(named_target(args.target), **changes)
