"""The command line: `actckpt COMMAND` and `python -m actckpt COMMAND`.

A command is one function in `_COMMANDS` that adds its parser and sets `run`. Whatever a command needs is
imported when it runs, so that `--help` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from actckpt._commands.compare import add_compare
from actckpt._commands.estimate import add_estimate
from actckpt._commands.messages import (
    EXIT_USAGE,
    as_options,
    explained_choice,
    none_fits,
    not_read,
    number,
    reason,
    slow,
    whole_number,
)
from actckpt._commands.plan import add_explain, add_plan
from actckpt._version import __version__

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["_Parser"]

__all__ = ["main"]

EXIT_INTERRUPTED = 130
#: As of programs that a signal ends: the reader of a pipe went away.
EXIT_BROKEN_PIPE = 141

_FIRST_STEPS = """\
first steps:
  actckpt demo                                  what each method saves and costs, on a small model
  actckpt demo --activation-budget 30%          the same, with the fastest plan that fits into that
  actckpt compare script.py                     what policies save and cost in a step of your own
  actckpt plan script.py --budget 24GiB         the fastest plan for it within that memory
  actckpt estimate script.py --find batch       the largest batch that fits on a device that is not here
In Python: actckpt.apply(model, budget="70GiB"); docs/budgets.md says how. actckpt COMMAND --help has all options.
"""


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        one_line = explained_choice(" ".join(message.split()))
        end = "" if one_line.endswith("?") else "."
        self.exit(EXIT_USAGE, f"{self.prog}: error: {one_line.rstrip('.')}{end} See {self.prog} --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: words after the program's name; None takes them from the process.

    Returns:
        The exit status. Usage errors leave through `SystemExit` with status 2.
    """
    parser = _Parser(
        prog="actckpt",
        description="Activation checkpointing and offloading for PyTorch.",
        epilog=_FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in _COMMANDS:
        add_command(commands)
    args, not_known = parser.parse_known_args(argv)
    if not_known:
        args.parser.error(not_read(not_known, re.findall(r"--[\w-]+", args.parser.format_help())))
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes nowhere
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("actckpt: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


_DEMO_NUMBERS = (
    ("steps", "optimizer steps per method"),
    ("layers", "transformer blocks"),
    ("dim", "width of the model, a multiple of twice the heads"),
    ("heads", "query heads"),
    ("seq", "bytes of text per sequence"),
    ("batch", "sequences per step"),
    ("seed", "of initialisation, batches and dropout"),
)


def _add_demo(commands: _Commands) -> None:
    from actckpt.demo.methods import METHODS
    from actckpt.demo.settings import DemoSettings

    parser = commands.add_parser(
        "demo",
        help="train a small language model with every method; compare time, memory and bits",
        description="Train a small byte-level language model on the source of Python's standard library with "
        "each method, check that all losses are equal bit for bit, and compare step time and peak activation "
        "memory. Exit status: 0 equal, 1 different, 2 bad arguments, or no plan fits the budget.",
        epilog="methods: " + "; ".join(f"{method.name} ({method.description})" for method in METHODS),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = DemoSettings()
    for name, meaning in _DEMO_NUMBERS:
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=whole_number, default=value, metavar="N", help=meaning)
    option = parser.add_argument
    option("--dropout", type=number, default=default.dropout, metavar="P", help="probability, below 1")
    option("--device", default=default.device, help="auto (the GPU where there is one), cpu, or a GPU: cuda, cuda:N")
    budget_help = (
        "train with the fastest plan that fits, too: 30%% of what plain training makes, or 50MiB (default: none)"
    )
    option("--activation-budget", default=argparse.SUPPRESS, metavar="SIZE", help=budget_help)
    option(
        "--methods",
        nargs="+",
        action="extend",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="see below (default: all)",
    )
    option("--out", type=Path, default=default.out, metavar="DIR", help="folder for demo.json and memory.png")
    option("--json", action="store_true", default=argparse.SUPPRESS, help="print demo.json instead of the table")
    option("--no-plot", dest="plot", action="store_false", default=argparse.SUPPRESS, help="draw no picture")
    parser.set_defaults(run=_run_demo, parser=parser)


def _run_demo(args: argparse.Namespace) -> int:
    from actckpt.demo.settings import DemoSettings

    fail: Callable[[str], NoReturn] = args.parser.error
    given = {field.name: getattr(args, field.name) for field in fields(DemoSettings) if hasattr(args, field.name)}
    try:
        settings = DemoSettings(**{**given, "methods": tuple(given.get("methods", ()))})
        from actckpt.demo.run import prepare_demo, run_demo  # loads torch: only once the numbers make sense
        from actckpt.planner import PlanInfeasibleError

        demo = prepare_demo(settings)
    except (ValueError, OSError) as error:
        fail(as_options(reason(error)))
    try:
        return run_demo(demo)
    except PlanInfeasibleError as error:
        return none_fits(args, error)
    except MemoryError as error:
        fail(reason(error))


def _add_doctor(commands: _Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what runs here and why, limits, and measured bandwidths",
        description="Say which versions and backends run here and why, the limits of the stores, and the measured "
        "bandwidth of link and disk.",
    )
    parser.add_argument("--no-measure", dest="measure", action="store_false", help="measure no bandwidth")
    parser.add_argument("--spill-dir", metavar="DIR", help="folder of the spill file (default: TMPDIR)")
    parser.add_argument("--json", action="store_true", help="print a JSON object of findings by topic")
    parser.set_defaults(run=_run_doctor, parser=parser)


def _run_doctor(args: argparse.Namespace) -> int:
    from actckpt.config import configure
    from actckpt.doctor import examine

    if args.spill_dir is not None:
        try:
            configure(spill_dir=args.spill_dir)
        except ValueError as error:
            args.parser.error(reason(error))
    found = {}
    with slow("actckpt doctor", "measuring, a few seconds in all (--no-measure leaves that out)"):
        for topic, finding in examine(measure=args.measure):
            found[topic] = finding
            if not args.json:
                print(f"{topic:<24}{finding}", flush=True)
    if args.json:
        print(json.dumps(found, indent=1))
    return 0


_COMMANDS: tuple[Callable[[_Commands], None], ...] = (
    _add_demo,
    _add_doctor,
    add_compare,
    add_plan,
    add_explain,
    add_estimate,
)
