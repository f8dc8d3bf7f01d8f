"""The demo's table, JSON file and picture."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from actckpt._core import devices
from actckpt._show.plot import plot_timelines
from actckpt._version import __version__
from actckpt.demo.settings import DemoSettings
from actckpt.demo.train import MethodResult

__all__ = ["as_json", "describe_plan", "describe_run", "draw_picture", "make_table"]

_MIB = 2**20
#: Predictions are off where they are by more than this share of what was measured.
_MOST_OFF = 0.1
_OFF = (
    "\nThe step took another time than was predicted, by more than a tenth: the machine was faster or slower while the "
    "plan was made than now, as where others use it. Run it again on one that does nothing else."
)
_NO_RACE = "\nNo race: each simple choice that fits is predicted to be slower by 3 % of a step or more."


def describe_run(settings: DemoSettings, device: torch.device) -> str:
    """One line: what was trained, and where."""
    accelerator = devices.accelerator_of(device.type)
    place = f"CPU, {torch.get_num_threads()} threads" if accelerator is None else accelerator.name_of(device)
    return (
        f"{settings.layers} layers, width {settings.dim}, batch {settings.batch} x {settings.seq} bytes, "
        f"dropout {settings.dropout:g}; {place}"
    )


def describe_plan(result: MethodResult, reference: MethodResult, device: torch.device) -> str:
    """The plan of a method in words, and what it predicted beside what was measured."""
    plan = result.plan
    assert plan is not None
    predicted = plan.step_seconds / plan.plain_seconds
    measured = result.median_step_seconds / reference.median_step_seconds
    return (
        f"\nPlan of {result.method!r}:\n{plan.explain()}\n"
        f"Predicted: peak {plan.peak_bytes / _MIB:.1f} MiB, step {predicted:.2f} x none. Measured: peak "
        f"{result.memory.peak_bytes / _MIB:.1f} MiB, step {measured:.2f} x none "
        f"(forward, backward and optimizer).{'' if plan.race or device.type != 'cpu' else _NO_RACE}"
        f"{_OFF if abs(predicted - measured) > _MOST_OFF * measured else ''}\n"
    )


def make_table(results: Sequence[MethodResult], *, title: str) -> Table:
    """Compare the results with the first of them."""
    table = Table(
        title=title,
        title_justify="left",
        caption="step: median of forward, backward and optimizer\n"
        "peak: activation bytes of one forward and backward\n"
        "loss: of the last step, nats per byte",
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    for heading in ("step (ms)", "x none", "peak (MiB)", "saved (%)", "loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    reference = results[0]
    for result in results:
        table.add_row(
            result.method,
            f"{result.median_step_seconds * 1e3:.1f}",
            f"{result.median_step_seconds / reference.median_step_seconds:.2f}",
            f"{result.memory.peak_bytes / _MIB:.1f}",
            f"{_saved_percent(result, reference):.1f}",
            f"{result.losses[-1]:.6f}",
        )
    return table


def as_json(
    results: Sequence[MethodResult],
    *,
    settings: DemoSettings,
    device: torch.device,
    differences: Sequence[str],
) -> str:
    """Return everything but the timelines; losses also in hex, which loses no bit.

    Args:
        results: the reference first.
        settings: as the user gave them.
        device: the one that was used.
        differences: messages about methods that are not equal to the reference; empty if all are.
    """
    content = {
        "settings": {**dataclasses.asdict(settings), "out": str(settings.out)},
        "environment": {
            "actckpt": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": describe_run(settings, device).rpartition("; ")[2],
            "device": str(device),
            "threads": torch.get_num_threads(),
        },
        "equal": not differences,
        "differences": list(differences),
        "results": [_result(result, results[0]) for result in results],
    }
    return json.dumps(content, indent=2) + "\n"


def draw_picture(path: Path, results: Sequence[MethodResult], *, title: str) -> None:
    """Draw live bytes over one step of each method; raises ImportError without matplotlib."""
    plot_timelines({result.method: result.memory.timeline for result in results}, title=title, path=path)


def _result(result: MethodResult, reference: MethodResult) -> dict[str, Any]:
    every_digest = "".join(result.digests.values())
    return {
        "method": result.method,
        "median_step_ms": result.median_step_seconds * 1e3,
        "peak_activation_bytes": result.memory.peak_bytes,
        "saved_percent": _saved_percent(result, reference),
        "final_loss": result.losses[-1],
        "losses": result.losses,
        "losses_hex": [loss.hex() for loss in result.losses],
        "step_ms": [seconds * 1e3 for seconds in result.step_seconds],
        "parameters_sha256": hashlib.sha256(every_digest.encode("ascii")).hexdigest(),
        "plan": None if result.plan is None else result.plan.to_dict(),
    }


def _saved_percent(result: MethodResult, reference: MethodResult) -> float:
    """Activation bytes that the peak is below the reference's, in percent of the reference's."""
    return 100 * (1 - result.memory.peak_bytes / reference.memory.peak_bytes)
