"""Two ranks with ColwiseParallel, RowwiseParallel and SequenceParallel: gradients, and what a policy holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_blocks import Block
from ranks import needs_gloo, run_on_two_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import actckpt
from actckpt.action import Action
from actckpt.memory import LiveStorages

pytestmark = needs_gloo

aten = torch.ops.aten

#: What activation checkpointing of transformers saves: matmuls and attention.
SAVED = [aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]

Method = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _parallel_model(mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(1)
    model = nn.Sequential(*(Block(64) for _ in range(2)))
    gathered = functools.partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model:
        plan = {
            "norm1": SequenceParallel(),
            "attention": gathered(),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "norm2": SequenceParallel(),
            "feed_forward": gathered(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    return model


def _input(mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(2)
    return DTensor.from_local(torch.randn(2, 32, 64) + dist.get_rank(), mesh, [Shard(1)]).requires_grad_()


def _train(mesh: Any, method: Method, steps: int = 2) -> list[torch.Tensor]:
    model, found = _parallel_model(mesh), []
    for _ in range(steps):
        x = _input(mesh)
        h = x * 1.0
        for block in model:
            h = method(block, h)
        h.square().mean().backward()
        found += [x.grad.full_tensor(), *(parameter.grad.full_tensor() for parameter in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return found


def _held_bytes(mesh: Any, method: Method) -> int:
    model, x = _parallel_model(mesh), _input(mesh)
    method(model[0], x * 1.0)
    found = []
    for _ in range(3):  # a collective that is over may hold its buffers for a moment longer
        h = x * 1.0
        with LiveStorages() as live:
            y = method(model[0], h)
            found.append(live.live_bytes)
        del y
    return min(found)


def _in_region(policy: Any, notes: list[Any] | None = None) -> Method:
    def method(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with actckpt.region(policy) as region:
            y = block(x)
        if notes is not None:
            notes[:] = region.report().rows
        return y

    return method


def _offloaded(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with actckpt.offload(min_bytes=0):
        return block(x)


METHODS: dict[str, Method] = {
    "recompute": _in_region("recompute"),
    "list": _in_region(SAVED),
    "per operator": _in_region(actckpt.policies.PerOp({SAVED[0]: Action.OFFLOAD}, default=Action.RECOMPUTE)),
    "offload policy": _in_region(lambda info: Action.OFFLOAD),
    "offload": _offloaded,
    "checkpoint": actckpt.checkpoint,
    "checkpoint with a list": functools.partial(actckpt.checkpoint, policy=SAVED),
    "region in offload": lambda block, x: _offloaded(functools.partial(_in_region("recompute"), block), x),  # type: ignore[arg-type]
}


def _selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, SAVED)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def _check() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    expected = _train(mesh, lambda block, x: block(x))
    for name, method in METHODS.items():
        for found, right in zip(_train(mesh, method), expected, strict=True):
            assert torch.equal(found, right), name
    rows: list[Any] = []
    held_bytes = _held_bytes(mesh, _in_region(SAVED, rows))
    of_collectives = sum(row.kept_bytes for row in rows if row.operator.startswith("_c10d_functional"))
    theirs = _held_bytes(mesh, _selective)
    assert held_bytes <= theirs + of_collectives, f"{held_bytes} of {theirs}, collectives {of_collectives}"
    assert held_bytes < 0.8 * _held_bytes(mesh, lambda block, x: block(x))
    assert _held_bytes(mesh, _in_region("recompute")) < held_bytes


def test_tensor_and_sequence_parallel_blocks_have_the_gradients_of_plain_autograd_and_hold_no_more_than_torch(
    tmp_path: Path,
) -> None:
    run_on_two_ranks(_check, tmp_path)
