"""`actckpt plan` and `actckpt explain`: make a plan for a memory budget, and show one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from actckpt._commands.messages import check_unit, slow
from actckpt._commands.running import FORM_HERE, Training, add_running, budget_of
from actckpt._commands.scripts import FORM, in_one_line

__all__ = ["add_explain", "add_plan"]

_ONLY_SCRIPTS = ("activation_budget", "batch", "seq", "blocks", "device")


def add_plan(commands: Any) -> None:
    """Add the parser of `actckpt plan`."""
    parser = commands.add_parser(
        "plan",
        help="find the fastest way through a training step within a memory budget",
        description="Find what to keep, recompute and offload so that a step is fastest within a memory budget: of\n"
        "the model and step of a script, which run on this machine (actckpt.plan; docs/budgets.md), or from a table\n"
        "of costs (docs/planning.md). Exit status: 0 a plan, 2 bad arguments, or none fits.",
        epilog=f"A plan that was saved is shown by actckpt explain, and run by actckpt.apply(model, policy=plan).\n\n"
        f"{FORM_HERE} {FORM}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("file", type=Path, metavar="FILE", help="a Python script (.py), see below, or a table of costs (JSON)")
    option(
        "--budget",
        metavar="SIZE",
        help="most memory at any time, all of it: 24GiB; for a script also a share of the device (0.9), or auto",
    )
    add_running(parser)
    option("--save", type=Path, metavar="FILE", help="write the plan to a JSON file")
    _add_showing(parser)
    parser.set_defaults(run=_run_plan, parser=parser)


def add_explain(commands: Any) -> None:
    """Add the parser of `actckpt explain`."""
    parser = commands.add_parser(
        "explain",
        help="say what a saved plan does, and why",
        description="Say of a plan what sets its peak, what is recomputed and offloaded and why, and what more memory "
        "would buy; then each value, and what becomes of it in which blocks. Exit status: 0 shown, 2 bad arguments.",
    )
    option = parser.add_argument
    option("file", type=Path, metavar="PLAN", help="a JSON file that actckpt plan --save or Plan.save wrote")
    _add_showing(parser)
    parser.set_defaults(run=_run_explain, parser=parser)


def _add_showing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead of words")
    plot_help = "draw time against memory, and the step, as PNG or SVG"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot_help)


@in_one_line
def _run_plan(args: argparse.Namespace) -> int:
    if args.save is not None and not args.save.absolute().parent.is_dir():  # before steps run
        raise ValueError(f"--save {args.save}: there is no folder {args.save.absolute().parent}. Make it first")
    plan = _of_script(args) if args.file.suffix == ".py" else _of_costs(args)
    if args.save is not None:
        plan.save(args.save)
    return _show(args, plan)


@in_one_line
def _run_explain(args: argparse.Namespace) -> int:
    from actckpt.planner.plans import Plan

    if args.file.suffix == ".py":
        raise ValueError(f"{args.file} is a Python script. To make a plan: actckpt plan {args.file} --save plan.json")
    return _show(args, Plan.load(args.file))


def _of_script(args: argparse.Namespace) -> Any:
    from actckpt.budgets import plan

    budget = budget_of(args)
    if not budget:
        raise ValueError("A plan is made for a budget. Pass --budget 24GiB, or --activation-budget 60%")
    with slow(args.parser.prog, "making the model") as say:
        training = Training(args, "plan")
        options: dict[str, Any] = {"blocks": args.blocks, "optimizer": training.optimizers, **budget}
        return plan(training.step(say), model=training.model, **options)


def _of_costs(args: argparse.Namespace) -> Any:
    from actckpt import planner
    from actckpt.planner.fields import read_json

    instead = "Pass a table of costs in JSON, or a Python script (.py)"
    content = read_json(args.file, what="cost table", instead=instead)
    if not isinstance(content, dict):
        raise ValueError(
            f"{args.file} is a {type(content).__name__} in JSON, and no table of costs; see docs/planning.md"
        )
    if "plan_version" in content:
        raise ValueError(f"{args.file} is a plan. To show it: actckpt explain {args.file}")
    if ignored := [f"--{name.replace('_', '-')}" for name in _ONLY_SCRIPTS if getattr(args, name) is not None]:
        raise ValueError(f"{args.file} is a table of costs, and {', '.join(ignored)} for scripts. Leave that out")
    if args.budget is None:
        raise ValueError(f"{args.file} is a table of costs. Pass --budget, for example --budget 24GiB")
    check_unit(args.budget)
    with slow(args.parser.prog, "finding the fastest plan"):
        return planner.solve(planner.CostTable.from_json(args.file), budget=args.budget)


def _show(args: argparse.Namespace, plan: Any) -> int:
    """Print a plan, and plot it if requested."""
    with slow(args.parser.prog, "explaining it, with plans for other budgets") as say:
        print(json.dumps(plan.to_dict(), indent=1) if args.json else f"{plan.explain()}\n\n{plan.table()}")
        if args.plot is not None:
            say(f"drawing {args.plot}")
            plan.plot(args.plot)
    return 0
