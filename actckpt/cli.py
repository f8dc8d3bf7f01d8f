"""The command line: `actckpt COMMAND` and `python -m actckpt COMMAND`.

A command is one function in `_COMMANDS` that adds its parser and sets `run`. Its imports happen when it runs, so that
`--help` and usage errors are fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from actckpt._commands.compare import add_compare
from actckpt._commands.demo import add_demo
from actckpt._commands.estimate import add_estimate
from actckpt._commands.messages import (
    EXIT_USAGE,
    explained_choice,
    not_read,
    reason,
    slow,
)
from actckpt._commands.plan import add_explain, add_plan
from actckpt._commands.profile import add_profile
from actckpt._commands.run import add_run
from actckpt._version import __version__

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["_Parser"]

__all__ = ["main"]

EXIT_INTERRUPTED = 130
#: Exit status of programs ended by SIGPIPE: the reader of a pipe went away.
EXIT_BROKEN_PIPE = 141

_FIRST_STEPS = """\
first steps:
  actckpt run --budget 24GiB train.py           train within that memory, without a change to the program
  actckpt demo                                  what each method saves and costs, on a small model
  actckpt profile script.py                     which modules and operators hold memory at the peak of a step
  actckpt compare script.py                     what policies save and cost in a step of your own
  actckpt plan script.py --budget 24GiB         the fastest plan for it within that memory
  actckpt estimate script.py --find batch       the largest batch that fits on a device that is not here
In Python: actckpt.apply(model, budget="70GiB"); docs/budgets.md says how. actckpt COMMAND --help has all options.
"""


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line instead of the whole usage."""

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
    if getattr(args, "runs_program", False):  # whose errors are not the command's
        return run(args)
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is left in the buffer
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("actckpt: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


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
    findings = {}
    with slow("actckpt doctor", "measuring, a few seconds in all (--no-measure leaves that out)"):
        for topic, finding in examine(measure=args.measure):
            findings[topic] = finding
            if not args.json:
                print(f"{topic:<24}{finding}", flush=True)
    if args.json:
        print(json.dumps(findings, indent=1))
    return 0


_COMMANDS: tuple[Callable[[_Commands], None], ...] = (
    add_run,
    add_demo,
    _add_doctor,
    add_profile,
    add_compare,
    add_plan,
    add_explain,
    add_estimate,
)
