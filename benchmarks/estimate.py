"""How near are estimates? Bytes and batches against steps that ran, and a shape too large to run here.

    python benchmarks/estimate.py --out benchmarks/results/estimate_MACHINE_DATE.json

1. Held bytes and peak of five models under three policies: estimated for the CPU, and counted in steps that ran.
2. The largest batch whose peak fits a limit: estimated, and found by running steps.
3. Models of `gpu_parts`, beside what results say that GPUs needed: bytes of their allocator, milliseconds.

       python benchmarks/estimate.py --parts devices --measured RESULT.json --out OTHER.json

4. Two layers of the shape of longchat-7b-16k (vocabulary 32000, hidden 4096, 32 heads, intermediate 11008), bfloat16,
   AdamW, 16384 tokens, for an H100: what a step holds with torch's checkpoint around each block, and with ours.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.nn import functional

import actckpt
from actckpt._estimate.largest import largest_that_fits
from actckpt.demo import LanguageModel
from actckpt.memory import LiveStorages

Step = Callable[[], object]
_PARTS = ("bytes", "batches", "devices", "longchat")
_aten = torch.ops.aten
_EXPENSIVE = [_aten.mm, _aten.addmm, _aten.bmm, _aten.convolution, _aten._scaled_dot_product_flash_attention_for_cpu]
POLICIES: dict[str, Any] = {"recompute": "recompute", "keep matmuls": _EXPENSIVE}


class Residual(nn.Module):
    """Two convolutions with batch norm, and one in-place operator."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same."""
        hidden = functional.relu(self.first_norm(self.first(x)), inplace=True)
        return functional.relu(x + self.second_norm(self.second(hidden)))


class ConvNet(nn.Module):
    """Residual blocks at one resolution, pooling, a linear layer."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 10)
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to (B, 10)."""
        out: Tensor = self.head(functional.max_pool2d(self.blocks(self.stem(x)), 2).mean((2, 3)))
        return out


class UNet(nn.Module):
    """Blocks at falling and rising resolutions, with connections between."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 1)
        self.down = nn.ModuleList(Residual(channels) for _ in range(blocks // 2))
        self.up = nn.ModuleList(Residual(channels) for _ in range(blocks // 2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to the same."""
        x, skipped = self.stem(x), []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = functional.avg_pool2d(x, 2)
        for block in self.up:
            x = block(functional.interpolate(x, scale_factor=2) + skipped.pop())
        out: Tensor = self.out(x)
        return out


class ViT(nn.Module):
    """Patches, transformer blocks, a mean and a linear layer."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 8, 8), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, H, W) to (B, 10)."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def llama(*, width: int, blocks: int, batch: int, seq: int) -> tuple[nn.Module, Step]:
    """Return the demo's language model and a step of it."""
    model = LanguageModel(layers=blocks, dim=width, heads=4, kv_heads=2, seq=seq, dropout=0.0)
    tokens = torch.randint(0, 256, (batch, seq))
    return model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def transformer(*, width: int, blocks: int, batch: int, seq: int) -> tuple[nn.Module, Step]:
    """Return torch's transformer with dropout and a causal mask, and a step of it."""
    layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
    model, x = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False), torch.randn(batch, seq, width)
    mask = nn.Transformer.generate_square_subsequent_mask(seq)
    return model, lambda: model(x, mask=mask, is_causal=True).sum().backward()


def _images(model: nn.Module, batch: int, size: int) -> tuple[nn.Module, Step]:
    x = torch.randn(batch, 3, size, size)
    return model, lambda: model(x).square().mean().backward()


def models(scale: int) -> dict[str, Callable[[], tuple[nn.Module, Step]]]:
    """Return what makes models and their steps, by name; sizes grow with `scale`."""
    return {
        "llama": lambda: llama(width=32 * scale, blocks=3, batch=2, seq=64 * scale),
        "transformer": lambda: transformer(width=32 * scale, blocks=3, batch=2, seq=48 * scale),
        "vit": lambda: _images(ViT(32 * scale, 3), 4, 32 * scale),
        "convnet": lambda: _images(ConvNet(8, 4), 2 * scale, 32),
        "unet": lambda: _images(UNet(8, 4), 2 * scale, 32),
    }


def compare_bytes(make: Callable[[], tuple[nn.Module, Step]]) -> list[dict[str, Any]]:
    """Estimate a model for the CPU, and count in steps that run.

    Returns:
        A row per policy.
    """
    model, step = make()
    start = time.perf_counter()
    found = actckpt.estimate(step, model=model, policies=POLICIES, target="cpu")
    seconds = time.perf_counter() - start
    counted = actckpt.compare(step, model=model, policies=POLICIES, rounds=1)
    return [
        {
            "policy": row.name,
            "estimated_held_bytes": row.held_bytes,
            "measured_held_bytes": counted[row.name].held_bytes,
            "estimated_peak_bytes": row.peak_bytes,
            "measured_peak_bytes": counted[row.name].peak_bytes,
            "estimate_seconds": seconds / len(found.rows),
        }
        for row in found.rows
    ]


def compare_batches(*, limit_bytes: int, policy: Any) -> dict[str, Any]:
    """Find the largest batch of the Llama-like model whose peak fits a limit: estimated, and by running steps."""
    model, _ = llama(width=64, blocks=3, batch=1, seq=128)
    policies = {} if policy is None else {"policy": policy}

    def step(batch: int) -> Step:
        tokens = torch.zeros(batch, 128, dtype=torch.long)
        return lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    def estimated(batch: int) -> int:
        return actckpt.estimate(step(batch), model=model, policies=policies, target="cpu").rows[-1].peak_bytes

    def measured(batch: int) -> int:
        run = step(batch)
        with LiveStorages(parameters=model.parameters()) as live:
            run()
        return live.peak_bytes

    start = time.perf_counter()
    found = largest_that_fits(estimated, limit_bytes)
    seconds = time.perf_counter() - start
    if policy is not None:
        actckpt.apply(model, policy)
    true = largest_that_fits(measured, limit_bytes)
    return {"limit_bytes": limit_bytes, "estimated": found, "true": true, "estimate_seconds": seconds}


def compare_devices(results: list[Path], names: list[str]) -> list[dict[str, Any]]:
    """Estimate models of `gpu_parts`, whole steps with their parameters, for the GPUs of results.

    Returns:
        A row per result, model and policy that was measured.
    """
    from gpu_parts import models

    all_sizes = {"llama": models.LLAMA, "vit": models.VIT, "unet": models.UNET}
    rows = []
    for path in results:
        result = json.loads(path.read_text())
        for name in names:
            measured = _measured_steps(result, name)
            if not measured:
                continue
            built = models.build(all_sizes[name], torch.device("meta"))
            if built.kind != measured["none"]["model"]:
                raise RuntimeError(f"{path} has {name} from {measured['none']['model']}, and here is {built.kind}.")
            gpu = measured["none"]["versions"]["gpu"]
            found = actckpt.estimate(
                lambda built=built: built.loss(built.model).backward(),
                model=built.model,
                target="h200" if "H200" in gpu else "h100",
                policies={"recompute": "recompute"},
            )
            rows += [
                {
                    "gpu": gpu,
                    "model": name,
                    "policy": policy,
                    "estimated_peak_bytes": found[policy].total_peak_bytes,
                    "measured_peak_bytes": row["peak_allocated_bytes"],
                    "estimated_ms": 1e3 * found[policy].seconds,
                    "measured_ms": row["device_ms"],
                    "measured_with": row["versions"],
                }
                for policy, row in measured.items()
            ]
    return rows


def _measured_steps(result: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a model without and with `recompute`, of `gpu_run.py` or in the form used before."""
    if "parts" in result:
        rows = result["parts"].get(name, {}).get("rows", {})
        named = {"none": rows.get("plain"), "recompute": rows.get("actckpt checkpoint")}
        return {policy: row for policy, row in named.items() if row is not None and "peak_allocated_bytes" in row}
    figures = result["figures"]
    if name not in figures:
        return {}
    choices, plain = figures["choices"] if name == "llama" else {}, figures[name]["plain"]
    common = {"model": plain["model"], "versions": {"gpu": result["machine"]["gpu"], **result["versions"]}}
    named = {"none": choices.get("nothing", plain), "recompute": choices.get("recompute")}
    return {
        policy: {"peak_allocated_bytes": row["peak_bytes"], "device_ms": row["ms"], **common}
        for policy, row in named.items()
        if row is not None
    }


class LongChatBlock(nn.Module):
    """A block of the shape of longchat-7b, with the norm and rotation that LitGPT writes out."""

    def __init__(self, hidden: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.attn, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.fc_1, self.fc_2 = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.mlp_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, S, hidden) to the same; cos and sin (S, head)."""
        qkv = self.attn(_rms_norm(x, self.norm_1)).unflatten(-1, (self.heads, 3, -1)).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.unbind(2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        hidden = _rms_norm(x, self.norm_2)
        out: Tensor = x + self.mlp_proj(functional.silu(self.fc_1(hidden)) * self.fc_2(hidden))
        return out


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


class LongChat(nn.Module):
    """Embedding, blocks, head. `wrap` calls a block."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32000, 4096), nn.Linear(4096, 32000, bias=False)
        self.blocks = nn.ModuleList(LongChatBlock(4096, 32, 11008) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(4096))
        self.wrap: Callable[..., Tensor] = lambda block, *args: block(*args)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, S) to logits (B, S, 32000)."""
        angles = torch.ones(tokens.shape[1], 128, dtype=self.norm.dtype)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.wrap(block, x, angles, angles)
        out: Tensor = self.head(_rms_norm(x, self.norm))
        return out


def longchat(*, tokens: int = 16384, layers: int = 2) -> dict[str, dict[str, Any]]:
    """Estimate the two layers of longchat-7b-16k for an H100.

    Returns:
        Figures by the way to checkpoint.
    """
    with torch.device("meta"):
        model = LongChat(layers).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        text = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    policies = {**POLICIES, "keep attention": [_aten._scaled_dot_product_flash_attention], "replay": []}
    start = time.perf_counter()
    ours = actckpt.estimate(step, model=model, policies=policies, optimizer=optimizer, blocks=LongChatBlock)
    seconds = (time.perf_counter() - start) / (len(ours.rows) + 1)
    model.wrap = lambda block, *args: torch_checkpoint.checkpoint(block, *args, use_reentrant=False)
    torchs = actckpt.estimate(step, model=model, policies={}, optimizer=optimizer)
    rows = {f"actckpt, {row.name}" if row.blocks else "no checkpointing": row for row in ours.rows}
    return {
        name: {
            "held_bytes": row.held_bytes,
            "peak_bytes": row.peak_bytes,
            "total_peak_bytes": row.total_peak_bytes,
            "seconds": row.seconds,
            "times_none": row.seconds / ours.rows[0].seconds,
            "estimate_seconds": seconds,
        }
        for name, row in {**rows, "torch checkpoint": torchs.rows[0]}.items()
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _print(figures: dict[str, Any]) -> None:
    for name, rows in figures.get("bytes", {}).items():
        for row in rows:
            ratio = row["estimated_peak_bytes"] / row["measured_peak_bytes"]
            print(f"{name:12} {row['policy']:13} peak {row['measured_peak_bytes']:>12}, estimated {ratio:.4f} of it")
    for name, row in figures.get("batches", {}).items():
        print(f"{name:13} largest batch {row['true']}, estimated {row['estimated']} in {row['estimate_seconds']:.1f} s")
    for row in figures.get("devices", []):
        sizes = ", ".join(f"{row[f'{kind}_peak_bytes'] / 2**30:.2f} GiB" for kind in ("estimated", "measured"))
        times = ", ".join(f"{row[f'{kind}_ms']:.0f} ms" for kind in ("estimated", "measured"))
        print(f"{row['gpu']}, {row['model']}, {row['policy']}: estimated, measured: {sizes}; {times}")
    for name, row in figures.get("longchat", {}).items():
        gigabytes = ", ".join(f"{key} {row[f'{key}_bytes'] / 2**30:.2f} GiB" for key in ("held", "peak", "total_peak"))
        print(f"{name:24} {gigabytes}, {1e3 * row['seconds']:.1f} ms ({row['times_none']:.3f} x)")


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; with `--out`, also write them."""
    parser = argparse.ArgumentParser(description="Estimates against steps that ran.")
    parser.add_argument("--scale", type=int, default=4, help="size of the models that run")
    parser.add_argument("--tokens", type=int, default=16384, help="of the longchat shape")
    parser.add_argument("--parts", nargs="+", default=_PARTS, choices=_PARTS, help="what to find out")
    parser.add_argument("--measured", nargs="+", type=Path, default=[], help="results of a GPU, for devices")
    parser.add_argument("--models", nargs="+", default=["llama", "vit", "unet"], help="of them, for devices")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    parts: dict[str, Callable[[], Any]] = {
        "bytes": lambda: {name: compare_bytes(make) for name, make in models(args.scale).items()},
        "batches": lambda: {
            name: compare_batches(limit_bytes=args.scale * (32 << 20), policy=policy)
            for name, policy in {"none": None, **POLICIES}.items()
        },
        "devices": lambda: compare_devices(args.measured, args.models),
        "longchat": lambda: longchat(tokens=args.tokens),
    }
    figures = {
        name: part() for name, part in parts.items() if name in args.parts and (name != "devices" or args.measured)
    }
    _print(figures)
    if args.out is not None:
        machine = {"processor": _processor(), "python": platform.python_version(), "torch": torch.__version__}
        args.out.write_text(json.dumps({"machine": machine, "figures": figures}, indent=1) + "\n")
        print(f"Wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
