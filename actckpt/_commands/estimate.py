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

from actckpt._commands.messages import check_unit, number, slow
from actckpt._commands.running import budget_of
from actckpt._commands.scripts import FORM, Script, add_policies, add_sizes, in_one_line, policies_of, sizes_of

__all__ = ["add_estimate"]

_RESERVE = 0.05
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
        "or auto; with --find the limit, a size (default: the target's memory less 5 %%)",
    )
    option("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run, parser=parser)


@in_one_line
def _run(args: argparse.Namespace) -> int:
    with slow("actckpt estimate", "making the model and running a first step") as say:
        command = _Command(args, say)
        with command.prepared():
            return command.find() if args.find else command.estimate()


def _check(args: argparse.Namespace) -> None:
    """Raise if an option would be ignored, or is no size."""
    if args.find is not None and (size := getattr(args, args.find)) is not None:
        raise ValueError(f"--{args.find} {size} beside --find {args.find}, which looks for it. Leave one of them out.")
    if args.budget is not None and args.find is not None:
        check_unit(args.budget)


class _Command:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        from actckpt._text.sizes import parse_bytes
        from actckpt.comparison import named_policies

        self._args, self._say, self._sizes = args, say, sizes_of(args)
        _check(args)
        self._target = _target(args)
        self._policies = named_policies(policies_of(args), "--policy", offloads=not self._target.is_cpu)
        self._budget = int(self._target.memory_bytes * (1 - _RESERVE))
        if args.budget is not None and args.find is not None:
            self._budget = parse_bytes(args.budget, what="--budget")
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
        rows = [self._largest(name, options) for name, options in {"none": None, **self._options()}.items()]
        if self._args.json:
            print(json.dumps({"find": self._args.find, "budget_bytes": self._budget, "rows": rows}, indent=1))
        else:
            print(self._table(rows))
        return 0 if any(row["size"] for row in rows) else 1

    def _largest(self, name: str, options: dict[str, Any] | None) -> dict[str, Any]:
        from actckpt._estimate.largest import largest_that_fits

        what = self._args.find
        figures_by_size: dict[int, Any] = {}

        def peak(size: int) -> int:
            self._say(f"{name}, {what} {size}")
            figures_by_size[size] = self._stepper.run(self._step(**{what: size}), options)
            return int(figures_by_size[size].total_peak_bytes)

        tolerance = _SEQUENCE_TOLERANCE if what == "seq" else 0.0
        size = largest_that_fits(peak, self._budget, tolerance=tolerance)
        figures = figures_by_size[size or 1]
        seconds = figures.busy_seconds + figures.stall_seconds
        return {"name": name, "size": size, "total_peak_bytes": figures.total_peak_bytes, "seconds": seconds}

    def _table(self, rows: list[dict[str, Any]]) -> str:
        from actckpt._text.sizes import format_bytes, format_seconds
        from actckpt._text.tables import aligned
        from actckpt.estimation import ERROR_OF_SECONDS

        lines = [("policy", f"largest {self._args.find}", "all", "step", f"step / {self._args.find}")]
        for row in rows:
            size, each = str(row["size"] or "not even 1"), row["seconds"] / (row["size"] or 1)
            seconds = format_seconds(row["seconds"]), format_seconds(each)
            lines.append((row["name"], size, format_bytes(row["total_peak_bytes"]), *seconds))
        limits = (
            f"Estimated for {self._target.name} within {format_bytes(self._budget)}; the host's memory has no limit."
        )
        return f"{aligned(lines, left=1)}\n{limits}\n{ERROR_OF_SECONDS}"


def _target(args: argparse.Namespace) -> Any:
    from actckpt._estimate.targets import named_target

    rates = {"flops_per_s": args.flops, "memory_bytes_per_s": args.bandwidth, "link_bytes_per_s": args.link}
    changes = {name: rate for name, rate in rates.items() if rate is not None}
    return dataclasses.replace(named_target(args.target), **changes)
