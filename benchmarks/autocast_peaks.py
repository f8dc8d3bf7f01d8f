"""Peak of policies over that of plain training, under bfloat16 autocast.

    PYTHONPATH=. .venv-integrations/bin/python benchmarks/autocast_peaks.py [--out RESULT.json]

Peaks of the second step, counted exactly (`LiveStorages`), of models of Transformers with random weights: with a region
around the whole model, and with `apply`. Gradients must be equal bit for bit. No audits, whose checksums count too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import actckpt
from actckpt import Action
from actckpt.memory import LiveStorages

aten = torch.ops.aten
POLICIES: dict[str, Any] = {
    "keep matmuls": "matmuls",
    "keep all but gelu and silu": actckpt.policies.PerOp(
        {aten.gelu: Action.RECOMPUTE, aten.silu: Action.RECOMPUTE}, default=Action.KEEP
    ),
}


def _sam() -> tuple[nn.Module, Tensor]:
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "output_channels": 32}
    config = SamVisionConfig(image_size=256, window_size=14, global_attn_indexes=[3], **sizes)
    return SamVisionEncoder(config), torch.randn(2, 3, 256, 256)


def _mamba() -> tuple[nn.Module, Tensor]:
    from transformers import Mamba2Config, Mamba2Model

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "state_size": 16, "num_heads": 8, "head_dim": 16}
    config = Mamba2Config(vocab_size=100, expand=2, n_groups=1, chunk_size=32, **sizes)
    return Mamba2Model(config), torch.randint(0, 100, (2, 128))


def _funnel() -> tuple[nn.Module, Tensor]:
    from transformers import FunnelConfig, FunnelModel

    config = FunnelConfig(vocab_size=100, block_sizes=[2, 2], d_model=128, n_head=4, d_head=32, d_inner=512)
    return FunnelModel(config), torch.randint(0, 100, (8, 128))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"SAM": _sam, "Mamba-2": _mamba, "Funnel": _funnel}


def _second_step(model: nn.Module, x: Tensor, region: Any = None) -> tuple[int, list[Tensor | None]]:
    """Return peak and gradients of the second step."""
    for _ in range(2):
        model.zero_grad()
        with LiveStorages() as live:
            with (
                torch.autocast("cpu", dtype=torch.bfloat16),
                contextlib.nullcontext() if region is None else actckpt.region(region),
            ):
                loss = model(x).last_hidden_state.float().pow(2).mean()
            loss.backward()
    return live.peak_bytes, [parameter.grad for parameter in model.parameters()]


def compare(name: str) -> dict[str, dict[str, float]]:
    """Return peaks over plain by policy, and by how it is used; raises where gradients differ."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model.eval()  # without dropout
    plain_bytes, expected = _second_step(model, x)
    ratios: dict[str, dict[str, float]] = {}
    for what, policy in POLICIES.items():
        ways = {"region": _second_step(model, x, policy)}
        actckpt.apply(model, policy)
        ways["apply"] = _second_step(model, x)
        actckpt.remove(model)
        for way, (_, gradients) in ways.items():
            for one, other in zip(gradients, expected, strict=True):
                if (one is None) != (other is None) or (one is not None and not torch.equal(one, other)):
                    raise AssertionError(f"{name}, {what}, {way}: a gradient differs from plain training's")
        ratios[what] = {way: peak_bytes / plain_bytes for way, (peak_bytes, _) in ways.items()}
    return ratios


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    actckpt.configure(audit="off")
    figures = {}
    for name in MODELS:
        figures[name] = compare(name)
        print(name, json.dumps(figures[name]), flush=True)
    packages = ("torch", "transformers")
    result = {
        "command": "python benchmarks/autocast_peaks.py",
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | {one: importlib.metadata.version(one) for one in packages},
        "figures": figures,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
