"""Tensor and sequence parallel blocks: collectives run in their forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable

from pool import NUM_RANKS
from training import Method, Training, batch, model_of


def _tensor_parallel(method: Method) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = model_of(dropout=0.0)
    for block in model.blocks:
        plan = {
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    method(model)
    return Training(lambda: list(model.parameters()), lambda step: model(batch(step, is_same=True)).square().mean())


def _sequence_parallel(method: Method) -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = model_of(dropout=0.0)
    gathered = functools.partial(PrepareModuleInput, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
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
    split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False)
    ends = {"first": split, "last": gathered(use_local_output=True)}
    parallelize_module(model, mesh, ends)
    method(model)
    return Training(lambda: list(model.parameters()), lambda step: model(batch(step, is_same=True)).square().mean())


KINDS: dict[str, Callable[[Method], Training]] = {
    "tensor parallel": _tensor_parallel,
    "sequence parallel": _sequence_parallel,
}
