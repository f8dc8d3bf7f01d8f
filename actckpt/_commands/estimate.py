"""`actckpt estimate script.py`: what a step would hold and take on a device, and the largest size that fits."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actckpt._commands.messages import check_unit, reason, unexpected

__all__ = ["add_estimate"]

_QUIET_SECONDS = 2.0
_RESERVE = 0.05
_SEQUENCE_TOLERANCE = 0.005
#: Torch's, of models that copy their layers (`TransformerEncoder`): it asks each copied tensor for its address.
_COPIES = "Accessing the data pointer of FakeTensor is deprecated"

_EXAMPLE = """\
  import torch

  def model():
      layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
      return torch.nn.TransformerEncoder(layer, 8)

  def optimizer(model):  # may be left out
      return torch.optim.AdamW(model.parameters())

  def step(model, batch=8, seq=512):
      x = torch.zeros(batch, seq, 1024, device="cuda")
      model(x).square().mean().backward()
"""
_EPILOG = f"""\
The script defines model(), which returns a module, and step(model, batch=..., seq=...), which runs forward and
backward; it may define optimizer(model). All are called on tensors without bytes: devices that they name are
replaced, and nothing is allocated. For example:

{_EXAMPLE}"""


def add_estimate(commands: Any, whole_number: Callable[[str], int], number: Callable[[str], float]) -> None:
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
    option("script", type=Path, metavar="SCRIPT", help="a Python file, see below")
    option("--target", default="h100", metavar="NAME", help="the device: h100 (default), h200, a100, b200, ...")
    option("--flops", type=number, metavar="F", help="its operations per second on 16-bit numbers: 989e12")
    option("--bandwidth", type=number, metavar="B", help="bytes per second of its memory: 3.35e12")
    option("--link", type=number, metavar="B", help="bytes per second to the memory of the host, one way: 64e9")
    option("--batch", type=whole_number, metavar="N", help="passed to step")
    option("--seq", type=whole_number, metavar="N", help="passed to step")
    option(
        "--policy",
        action="append",
        metavar="NAME",
        help="as in actckpt.apply: recompute, matmuls, attention, offload, ...; or aten.mm,aten.bmm,...: "
        "operators whose results are kept; or plan.json, which Plan.save wrote; may be repeated (default: recompute, "
        "keep matmuls, offload)",
    )
    option("--blocks", nargs="+", metavar="NAME", help="qualified names of blocks, also with wildcards")
    option("--find", choices=("batch", "seq"), help="find the largest one that fits the budget")
    option("--budget", metavar="SIZE", help="for --find, with a unit: 70GiB (default: the target's memory less 5 %%)")
    option("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    try:
        _check(args)
        command = _Command(args)
        with command.prepared():
            return command.find() if args.find else command.estimate()
    except BrokenPipeError:
        raise
    except Exception as error:
        from actckpt.errors import ActckptError

        raised = unexpected(error, str(args.script))
        if raised is None and not isinstance(error, (ValueError, OSError, ActckptError)):
            raise
        args.parser.error(raised or reason(error))
        raise AssertionError from error  # it does not return


def _check(args: argparse.Namespace) -> None:
    """Raise where an option would be ignored, or is no size."""
    for name in ("batch", "seq"):
        if (size := getattr(args, name)) is not None and size < 1:
            raise ValueError(f"--{name} is {size}, but must be at least 1.")
        if size is not None and args.find == name:
            raise ValueError(f"--{name} {size} beside --find {name}, which looks for it. Leave one of them out.")
    if args.budget is not None and args.find is None:
        raise ValueError(
            f"--budget {args.budget} limits what --find looks for. Add --find batch or --find seq, or leave it out: "
            "without --find the estimate is the same for each budget."
        )
    if args.budget is not None:
        check_unit(args.budget)


class _Progress:
    """Says on the standard error stream what is under way, once it takes long."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __call__(self, what: str) -> None:
        elapsed = time.monotonic() - self._start_s
        if elapsed > _QUIET_SECONDS:
            print(f"actckpt estimate: {elapsed:.0f} s: {what}", file=sys.stderr, flush=True)


class _Command:
    """One run of the command."""

    def __init__(self, args: argparse.Namespace) -> None:
        from actckpt._text.sizes import parse_bytes
        from actckpt.comparison import named_policies

        self._args = args
        self._target = _target(args)
        given = _policies(args)
        self._policies = named_policies(given, "--policy", offloads=not self._target.is_cpu)
        memory = int(self._target.memory_bytes * (1 - _RESERVE))
        self._budget = memory if args.budget is None else parse_bytes(args.budget, what="--budget")
        self._progress = _Progress()

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Load the script, make its model and run a first step, all on fakes."""
        from actckpt._core.optimizers import optimizers_of
        from actckpt._core.steps import Step
        from actckpt._estimate.estimating import Stepper, explained
        from actckpt._estimate.fakes import Fakes

        with Fakes(self._target) as fakes:
            script = _load(self._args.script)
            with explained(None), warnings.catch_warnings():
                warnings.filterwarnings("ignore", _COPIES)
                self._model = script["model"]()
                if not hasattr(self._model, "named_modules"):
                    raise ValueError(
                        f"{self._args.script}: model() returned a {type(self._model).__name__}, no module."
                    )
                optimizer = script["optimizer"](self._model) if "optimizer" in script else None
                optimizers = optimizers_of(optimizer, self._model, "estimate")
            self._function = script["step"]
            self._stepper = Stepper(fakes, self._target, self._model, optimizers)
            with self._stepper:
                self._progress("the first step")
                self._stepper.warm_up(Step(self._step(), "estimate", self._model))
                yield

    def _step(self, **sizes: int) -> Callable[[], object]:
        """Return the step at the sizes of the command line, or at others."""
        given = {name: getattr(self._args, name) for name in ("batch", "seq")}
        given = {name: size for name, size in given.items() if size is not None} | sizes
        if self._args.find is not None:
            given.setdefault(self._args.find, 1)
        try:
            inspect.signature(self._function).bind(self._model, **given)
        except TypeError as error:
            options = " ".join(f"--{name} {size}" for name, size in given.items()) or "no --batch, no --seq"
            raise ValueError(
                f"{self._args.script}: step(model, batch=..., seq=...) cannot be called with {options}: {error}."
            ) from None
        return lambda: self._function(self._model, **given)

    def _options(self) -> dict[str, dict[str, Any]]:
        """Return keywords of `apply` by policy. The script may have defined operators that they name."""
        from actckpt.estimation import checked_options

        blocks = self._args.blocks
        return {name: checked_options(each, blocks, f"--policy {name}") for name, each in self._policies.items()}

    def estimate(self) -> int:
        """Print the estimate of one size."""
        from actckpt.estimation import estimate_with

        found = estimate_with(self._stepper, self._step(), self._target, self._options(), self._progress)
        print(json.dumps(found.as_dict(), indent=1) if self._args.json else found.table())
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
        found: dict[int, Any] = {}

        def peak(size: int) -> int:
            self._progress(f"{name}, {what} {size}")
            found[size] = self._stepper.run(self._step(**{what: size}), options)
            return int(found[size].total_peak_bytes)

        tolerance = _SEQUENCE_TOLERANCE if what == "seq" else 0.0
        size = largest_that_fits(peak, self._budget, tolerance=tolerance)
        figures = found[size or 1]
        seconds = figures.busy_seconds + figures.stall_seconds
        return {"name": name, "size": size, "total_peak_bytes": figures.total_peak_bytes, "seconds": seconds}

    def _table(self, rows: list[dict[str, Any]]) -> str:
        from actckpt._text.sizes import format_bytes, format_seconds
        from actckpt._text.tables import aligned

        lines = [("policy", f"largest {self._args.find}", "all", "step")]
        for row in rows:
            size = str(row["size"]) if row["size"] else "not even 1"
            lines.append((row["name"], size, format_bytes(row["total_peak_bytes"]), format_seconds(row["seconds"])))
        return f"{aligned(lines, left=1)}\nEstimated for {self._target.name} within {format_bytes(self._budget)}."


def _target(args: argparse.Namespace) -> Any:
    from actckpt._estimate.targets import named_target

    rates = {"flops_per_s": args.flops, "memory_bytes_per_s": args.bandwidth, "link_bytes_per_s": args.link}
    given = {name: rate for name, rate in rates.items() if rate is not None}
    return dataclasses.replace(named_target(args.target), **given)


def _policies(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the policies of the command line; None where it names none."""
    from actckpt.comparison import PLAIN, default_policies

    if args.policy is None:
        return None
    known = default_policies(offloads=True)
    given = dict.fromkeys(args.policy)
    given.pop(PLAIN, None)  # which always has a row
    return {name: known[name] if name in known else _policy(name) for name in given}


def _policy(name: str) -> Any:
    """Return a policy by its name, a list of operators to keep, or a plan from its file."""
    from actckpt.planner.plans import Plan
    from actckpt.policies import choice_of

    if name.endswith(".json"):
        return Plan.load(name)
    if "." in name or "," in name:  # known once the script has run: it may define them
        return [op.strip() for op in name.split(",")]
    choice_of(name)  # raises if it is none
    return name


def _load(path: Path) -> dict[str, Any]:
    """Run a script and return what it defines."""
    if not path.is_file():
        raise ValueError(f"{path} is no file. Pass a Python script that defines model() and step(model, ...).")
    if path.suffix == ".json":
        raise ValueError(f"{path} is no Python script. To show a plan: actckpt plan {path}; to estimate it: --policy.")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        script = runpy.run_path(str(path), run_name="__actckpt__")
    finally:
        sys.path.pop(0)
    if missing := [name for name in ("model", "step") if not callable(script.get(name))]:
        raise ValueError(
            f"{path} defines no {' and no '.join(f'{name}()' for name in missing)}. Define model(), which returns a "
            "module, and step(model, batch=..., seq=...), which runs forward and backward."
        )
    return script
