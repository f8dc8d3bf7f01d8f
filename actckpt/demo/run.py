"""Run the demo: check the settings, train with every method, compare, report."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from actckpt._budget.sizes import activation_budget_bytes
from actckpt._core import devices
from actckpt.demo.comparison import find_differences
from actckpt.demo.data import batches, read_text
from actckpt.demo.methods import Method, budgeted, choose_methods
from actckpt.demo.output import as_json, describe_plan, describe_run, draw_picture, make_table
from actckpt.demo.progress import Bars, Lines
from actckpt.demo.settings import DemoSettings
from actckpt.demo.train import MethodResult, train

__all__ = ["Demo", "prepare_demo", "run_demo"]

EXIT_EQUAL = 0
EXIT_DIFFERENT = 1

_UNSTEADY = (
    "plain training, which no method touches, gave other bits in a second run: torch's kernels do not always repeat "
    "themselves on this machine. The methods are compared with the second run."
)


@dataclass(frozen=True)
class Demo:
    """Settings that were checked, with what they refer to on this machine.

    Attributes:
        settings: as given.
        methods: the reference first.
        text: uint8 (N,).
        device: where to train.
    """

    settings: DemoSettings
    methods: tuple[Method, ...]
    text: torch.Tensor
    device: torch.device


def prepare_demo(settings: DemoSettings) -> Demo:
    """Check against this machine what `DemoSettings` alone cannot; makes the output folder.

    Args:
        settings: what to run.

    Returns:
        What `run_demo` takes.

    Raises:
        ValueError: an unknown method, a device that is not usable here, too little text, an output folder
            that cannot be written.
        OSError: the standard library's source is not there or cannot be read.
    """
    methods = choose_methods(settings.methods)
    if settings.activation_budget is not None:
        activation_budget_bytes(settings.activation_budget, plain_bytes=1.0)  # raises if it is none
        methods += (budgeted(settings.activation_budget),)
    device = devices.usable(settings.device)
    text = read_text()
    next(batches(text, batch=1, seq=settings.seq, seed=settings.seed))
    _make_writable(settings.out)
    return Demo(settings, methods, text, device)


def run_demo(demo: Demo) -> int:
    """Train with every method and report: progress on stderr, the table on stdout, files in the folder.

    Args:
        demo: from `prepare_demo`.

    Returns:
        The exit status: 0 if all methods are equal bit for bit, else 1.

    Raises:
        MemoryError: the model or its activations do not fit.
        PlanInfeasibleError: no plan fits the budget; before anything but its first step ran.
    """
    errors = Console(stderr=True, soft_wrap=True)
    with _repeatable(demo.device):
        results = _train_all(demo, errors)
        differences = find_differences(results)
        if differences:
            again = _train_all(replace(demo, methods=demo.methods[:1]), errors)
            if find_differences([*results[:1], *again]):
                errors.print(f"NOTE: {_UNSTEADY}", style="bold", highlight=False)
                results[:1] = again
                differences = find_differences(results)
    content = as_json(results, settings=demo.settings, device=demo.device, differences=differences)
    files = _write(demo, results, content, errors)  # before anything is printed, to where nobody may read it
    for message in differences:
        errors.print(f"FAILED: {message}", style="bold red", highlight=False, markup=False)
    if demo.settings.json:
        print(content, end="")
    else:
        _show(demo, results, files, is_equal=not differences)
    return EXIT_DIFFERENT if differences else EXIT_EQUAL


def _write(demo: Demo, results: list[MethodResult], content: str, errors: Console) -> list[Path]:
    """Write the JSON file and the picture; return which files there are."""
    files = [demo.settings.out / "demo.json"]
    files[0].write_text(content, encoding="ascii")
    if demo.settings.plot:
        try:
            draw_picture(demo.settings.out / "memory.png", results, title=describe_run(demo.settings, demo.device))
            files.append(demo.settings.out / "memory.png")
        except ImportError:
            errors.print("No picture: matplotlib is not installed; pip install 'actckpt\\[plot]' brings it.")
    return files


def _show(demo: Demo, results: list[MethodResult], files: list[Path], *, is_equal: bool) -> None:
    """Print the table, the plan if there is one, and what was written."""
    console = _Console()
    console.print(make_table(results, title=describe_run(demo.settings, demo.device)))
    for result in results:
        if result.plan is not None:
            console.print(describe_plan(result, results[0], demo.device), soft_wrap=True, highlight=False, markup=False)
    console.print(f"Wrote {' and '.join(str(file) for file in files)}.", soft_wrap=True, highlight=False)
    if is_equal:
        console.print(
            f"Equal bit for bit: the losses of all {demo.settings.steps} steps and every parameter after them, "
            f"with {len(results)} methods.",
            soft_wrap=True,
            highlight=False,
        )


class _Console(Console):
    """Leaves a reader of its output that goes away to the command line, which knows the exit status for it."""

    def on_broken_pipe(self) -> None:
        """Return, so that the caller raises."""
        self.quiet = True
        raise BrokenPipeError


def _train_all(demo: Demo, console: Console) -> list[MethodResult]:
    found: dict[str, MethodResult] = {}
    in_turn = sorted(demo.methods, key=lambda method: not method.may_not_fit)
    steps = demo.settings.steps
    with (Bars if console.is_terminal else Lines)(in_turn, steps, console) as progress:
        for method in in_turn:
            progress.begin(method)
            with _explained_out_of_memory(method, demo):
                found[method.name] = train(
                    method,
                    demo.settings,
                    text=demo.text,
                    device=demo.device,
                    on_step=progress.step,
                    on_race=progress.race,
                )
    return [found[method.name] for method in demo.methods]


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--out is {str(folder)!r}, which cannot be written ({error.strerror}); "
            "name a folder that you may write to."
        ) from error


@contextlib.contextmanager
def _explained_out_of_memory(method: Method, demo: Demo) -> Iterator[None]:
    """Turn the allocators' RuntimeErrors into one MemoryError that says which settings to make smaller."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        what, reason = describe_run(demo.settings, demo.device), str(error).splitlines()[0].rstrip(".")
        raise MemoryError(
            f"method {method.name} does not fit in memory with {what}: {reason}. "
            "Try a smaller --batch, --seq, --layers or --dim."
        ) from error


@contextlib.contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Make a GPU choose kernels that give the same bits every time; those used on the CPU do, nearly always."""
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # the comparison of bits is the judge
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
