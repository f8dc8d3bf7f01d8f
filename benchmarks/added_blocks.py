"""Peaks of the smallest plans with and without blocks that a budget adds, over the peak of plain training.

    python benchmarks/added_blocks.py [--models resnet18 densenet121 ...] [--images 8] [--out RESULT.json]

Models of timm with random weights on 64 x 64 images, on the CPU, one thread. "recompute": `apply(model)`. "repeated": a
budget that no plan meets, for the repeated blocks only, so the smallest plan runs. "added": the same without `blocks=`,
so that large modules outside of these become blocks, too. Each gradient is compared with that of plain training.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import actckpt
from actckpt.memory import LiveStorages

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))
from torchvision_stub import import_timm

timm = import_timm()

#: Steps under a budget: the peak of the last one counts.
_NUM_STEPS = 8
_MODELS = [
    "resnet18",
    "resnet50",
    "densenet121",
    "mobilenetv3_small_100",
    "efficientnet_b0",
    "convnext_atto",
    "regnetx_002",
]


def _step(model: torch.nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model.zero_grad()
    with LiveStorages(parameters=model.parameters()) as live:
        model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], live.peak_bytes


def _peak(model: torch.nn.Module, x: torch.Tensor, expected: list[list[torch.Tensor]]) -> int:
    for step in range(_NUM_STEPS):
        gradients, peak = _step(model, x)
        if not all(map(torch.equal, gradients, expected[step])):
            raise AssertionError("gradients differ from those of plain training")
    return peak


def measure(name: str, images: int) -> dict[str, Any]:
    """Return the figures of one model."""
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False)
    x = torch.randn(images, 3, 64, 64)
    plain = copy.deepcopy(model)
    expected, peaks = zip(*(_step(plain, x) for _ in range(_NUM_STEPS)), strict=True)
    row: dict[str, Any] = {"plain_bytes": peaks[-1]}
    repeated = actckpt.apply(copy.deepcopy(model))
    budget = {"activation_budget": 1, "race": False}
    options: dict[str, dict[str, Any]] = {
        "recompute": {},
        "repeated": {**budget, "blocks": repeated},
        "added": budget,
    }
    for kind, keywords in options.items():
        trained = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", actckpt.errors.ActckptWarning)  # no plan fits
            actckpt.apply(trained, **keywords)
            row[kind] = round(_peak(trained, x, list(expected)) / peaks[-1], 3)
    row["added_blocks"] = [each for each in actckpt.remove(trained) if each not in repeated]
    return row


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for name in arguments.models:
        figures[name] = measure(name, arguments.images)
        print(name, figures[name], flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()} CPU, one thread",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "images": arguments.images,
        "figures": figures,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
