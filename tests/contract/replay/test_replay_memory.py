"""Bytes that per-op policies hold after forward and at the peak, against plain autograd and torch's own."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint, create_selective_checkpoint_contexts
from transformer_block import Block

import actckpt
from actckpt.memory import LiveStorages

aten = torch.ops.aten
KEPT = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]


#: Checksums need memory too, in the first step.
pytestmark = pytest.mark.usefixtures("no_audit")


def _measure(run: Any) -> tuple[int, int]:
    """Return bytes held after forward, and the peak."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(64) for _ in range(4))
    x = torch.randn(2, 128, 64, requires_grad=True)
    gc.collect()
    with LiveStorages(parameters=[*blocks.parameters(), x]) as live:
        h = x
        for block in blocks:
            h = run(block, h)
        loss = h.square().mean()
        del h
        held = live.live_bytes
        loss.backward()
    return held, live.peak_bytes


def test_keeping_matmuls_holds_and_peaks_no_higher_than_selective_checkpointing_of_torch() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, KEPT)
    plain = _measure(lambda block, x: block(x))
    theirs = _measure(lambda block, x: torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts))
    ours = _measure(lambda block, x: actckpt.checkpoint(block, x, policy=KEPT))
    print(f"held {ours[0] / plain[0]:.3f} (torch {theirs[0] / plain[0]:.3f}), ", end="")
    print(f"peak {ours[1] / plain[1]:.3f} (torch {theirs[1] / plain[1]:.3f}) of plain")
    assert ours[0] <= theirs[0]
    assert ours[1] <= theirs[1]
    assert ours[0] < 0.66 * plain[0]


def test_recomputing_per_block_peaks_no_higher_than_checkpoint_of_torch() -> None:
    theirs = _measure(lambda block, x: torch_checkpoint(block, x, use_reentrant=False))

    def region(block: nn.Module, x: Tensor) -> Tensor:
        with actckpt.region():
            return block(x)

    ours = _measure(region)
    print(f"held {ours[0]} (torch {theirs[0]}), peak {ours[1]} (torch {theirs[1]})")
    assert ours[0] <= theirs[0]
    assert ours[1] <= theirs[1]
