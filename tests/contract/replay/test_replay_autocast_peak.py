"""Peaks of policies that keep or move matrix products, under bfloat16 autocast: never above plain autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name
from transformer_block import Residual

import actckpt
from actckpt import Action
from actckpt.memory import LiveStorages

aten = torch.ops.aten
MIB = 2**20
#: In the first step, which is audited: temporaries of checksums, and what is on its way to a store that is in use.
CHECKSUMS, WINDOW = MIB // 2, 4 * MIB
MATMULS: list[Any] = [aten.mm, aten.addmm]
PRODUCTS = [*MATMULS, aten.bmm, aten.baddbmm, aten.convolution]
MOVED = actckpt.policies.PerOp({aten.convolution: Action.OFFLOAD, aten.addmm: Action.OFFLOAD}, default=Action.RECOMPUTE)
POLICIES = {"matmuls": MATMULS, "products": PRODUCTS, "moved": MOVED}


class Attention(nn.Module):
    """Attention with positions relative to each other and a softmax in float32, as SAM has it."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.relative = nn.Parameter(torch.randn(length, length, dim // 4) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, batch * 4, length, -1).unbind(0)
        scores = (q * 0.1) @ k.transpose(-2, -1) + torch.einsum("btc,tkc->btk", q, self.relative)
        y = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
        x = x + self.out(y.view(batch, 4, length, -1).permute(0, 2, 1, 3).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Scan(nn.Module):
    """A gated convolution along the sequence and a decay in float32, as Mamba has them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.conv = nn.Conv1d(dim, dim, 4, padding=3, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.into(self.norm(x)).chunk(2, -1)
        h = F.silu(self.conv(h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)).float()
        decay = torch.exp(torch.cumsum(h, 1) * 0.001)
        return x + self.out(h.to(gate.dtype) * decay.to(gate.dtype) * F.silu(gate))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (lambda: nn.Sequential(*(Attention(128, 64) for _ in range(4))), (6, 64, 128)),
    "convolutions": (lambda: nn.Sequential(*(Residual(16) for _ in range(5))), (6, 16, 32, 32)),
    "scan": (lambda: nn.Sequential(*(Scan(128) for _ in range(5))), (6, 96, 128)),
}


def _whole(model: Any, x: Tensor, policy: Any) -> Tensor:
    with contextlib.nullcontext() if policy is None else actckpt.region(policy):
        result: Tensor = model(x)
    return result


def _blocks(model: Any, x: Tensor, policy: Any) -> Tensor:
    for block in model:
        x = block(x) if policy is None else actckpt.checkpoint(block, x, policy=policy)
    return x


def _peaks(name: str, run: Callable[..., Tensor], policy: Any) -> list[int]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    peaks = []
    for _ in range(2):
        model.zero_grad()
        with LiveStorages(parameters=model.parameters()) as live:
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(model, x, policy).float().square().mean()
            loss.backward()
        peaks.append(live.peak_bytes)
    return peaks


@pytest.mark.parametrize("run", [_whole, _blocks])
@pytest.mark.parametrize("name", MODELS)
def test_no_step_peaks_above_plain(name: str, run: Callable[..., Tensor]) -> None:
    before = actckpt.configure().max_inflight
    for limit in ("64MiB", before):  # a store that an earlier test used is made again when it is used next
        actckpt.configure(max_inflight=limit)
    plain = max(_peaks(name, run, None))
    for policy in POLICIES:
        first, second = _peaks(name, run, POLICIES[policy])
        print(f"{name}, {policy}: first {first / plain:.3f}, second {second / plain:.3f} of {plain / MIB:.1f} MiB")
        assert second <= plain
        assert first <= plain + CHECKSUMS + (WINDOW if policy == "moved" else 0)
