"""`actckpt demo`: train a small language model with several methods; compare bits, memory and time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from actckpt._commands.messages import as_options, number, reason, whole_number

__all__ = ["add_demo"]

#: Options with their defaults.
_NUMBERS = (
    ("steps", 20, "optimizer steps per method"),
    ("layers", 8, "transformer blocks"),
    ("dim", 128, "width of the model, a multiple of twice the heads"),
    ("heads", 4, "query heads"),
    ("seq", 256, "bytes of text per sequence"),
    ("batch", 4, "sequences per step"),
    ("seed", 0, "of initialization, batches and dropout"),
)


def add_demo(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "demo",
        help="train a small language model with several methods; compare bits, memory and time",
        description="Train a small byte-level language model on the source of Python's standard library: plainly, with "
        "torch.utils.checkpoint, and with actckpt (recompute, keep matmuls, budgets). Exit status: 0 if all losses and "
        "parameters are bit-identical, 1 if not, 2 for bad arguments.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, value, meaning in _NUMBERS:
        parser.add_argument(f"--{name}", type=whole_number, default=value, metavar="N", help=meaning)
    option = parser.add_argument
    option("--dropout", type=number, default=0.1, metavar="P", help="probability, below 1")
    option("--device", default="auto", help="auto (the GPU where there is one), cpu, or a GPU: cuda, cuda:N")
    option(
        "--activation-budget",
        nargs="*",
        default=["75%", "50%", "25%"],
        metavar="SIZE",
        help="activation budgets to train with: shares of plain training (50%%), or sizes (20MiB)",
    )
    option("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="folder for demo.json and demo.png")
    option("--json", action="store_true", default=argparse.SUPPRESS, help="print demo.json instead of the table")
    option("--no-plot", action="store_true", default=argparse.SUPPRESS, help="draw no picture")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    from actckpt._core import devices
    from actckpt.demo import Options, run

    fail: Callable[[str], NoReturn] = args.parser.error
    numbers = {name: getattr(args, name) for name, *_ in _NUMBERS}
    try:
        device = devices.usable(args.device)
        options = Options(dropout=args.dropout, device=device, activation_budgets=args.activation_budget, **numbers)
        return run(options, out=args.out, prints_json=hasattr(args, "json"), draws=not hasattr(args, "no_plot"))
    except BrokenPipeError:  # the command line sets the exit status for it
        raise
    except (ValueError, OSError) as error:
        fail(as_options(reason(error)))
