"""`actckpt profile script.py`: which modules and operators hold memory at the peak of a training step."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from actckpt._commands.messages import slow, whole_number
from actckpt._commands.running import FORM_HERE, Training, add_device
from actckpt._commands.scripts import FORM, add_sizes, in_one_line

__all__ = ["add_profile"]


def add_profile(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "profile",
        help="say which modules and operators hold memory at the peak of a step",
        description="Run a training step and say which modules and operators hold memory at its peak\n"
        "(actckpt.profile; docs/memory.md). Exit status: 0 shown, 2 bad arguments.",
        epilog=f"{FORM_HERE} {FORM}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("file", type=Path, metavar="SCRIPT", help="a Python file, see below")
    add_sizes(parser, blocks=False)
    add_device(parser)
    option("--by", choices=["module", "operator"], help="one row per module, or per operator")
    option("--top", type=whole_number, default=15, metavar="N", help="number of rows (default: 15)")
    option("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run, parser=parser)


@in_one_line
def _run(args: argparse.Namespace) -> int:
    from actckpt.memory_profile import profile

    with slow(args.parser.prog, "making the model") as say:
        training = Training(args, "profile")
        found = profile(training.step(say), model=training.model)
    table = found.table(args.by, top=args.top)
    print(found.as_json() if args.json else f"{found.summary}\n{table}")
    return 0
