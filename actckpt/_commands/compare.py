"""`actckpt compare script.py`: time, held bytes and peak of a training step under several policies, measured here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from actckpt._commands.messages import slow, whole_number
from actckpt._commands.running import FORM_HERE, Training, add_running, budget_of
from actckpt._commands.scripts import FORM, add_policies, in_one_line, policies_of

__all__ = ["add_compare"]


def add_compare(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "compare",
        help="measure a training step under several policies: time, memory and bits",
        description="Run a training step under several policies, which take turns, and compare time, bytes held after\n"
        "the forward, peak and gradients with those of the step without actckpt (actckpt.compare; docs/compare.md).\n"
        "Exit status: 0 equal bit for bit, 1 different, 2 bad arguments, or no plan fits the budget.",
        epilog=f"{FORM_HERE} {FORM}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("file", type=Path, metavar="SCRIPT", help="a Python file, see below")
    add_policies(parser, "recompute, keep matmuls, on a GPU offload")
    option(
        "--budget",
        metavar="SIZE",
        help="the fastest plan that fits, too: most memory at any time, all of it: 24GiB, a share of the device (0.9), "
        "or auto",
    )
    add_running(parser)
    option("--rounds", type=whole_number, default=5, metavar="N", help="how often each one is timed (default: 5)")
    option("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run, parser=parser)


@in_one_line
def _run(args: argparse.Namespace) -> int:
    from actckpt.comparison import compare, default_policies, offloads

    budget, policies = budget_of(args), policies_of(args)
    with slow(args.parser.prog, "making the model") as say:
        training = Training(args, "compare")
        policies = default_policies(offloads=offloads(training.model)) if policies is None else policies
        policies |= {f"{name.replace('_', ' ')} {getattr(args, name)}": {name: size} for name, size in budget.items()}
        of = "" if budget else f" of {(len(policies) + 1) * (args.rounds + 2)}"
        options: dict[str, Any] = {"policies": policies, "blocks": args.blocks, "optimizer": training.optimizers}
        if args.batch is not None:
            options |= {"samples": args.batch, "tokens": None if args.seq is None else args.batch * args.seq}
        comparison = compare(training.step(say, of), model=training.model, rounds=args.rounds, **options)
    print(json.dumps(comparison.as_dict(), indent=1) if args.json else comparison.table())
    return 0 if all(row.same_bits for row in comparison.rows) else 1
