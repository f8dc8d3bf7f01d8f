"""Tensor and sequence parallel blocks: collectives run in their forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from pool import NUM_RANKS, Ranks, on_ranks
from training import OURS, Method, Training, applied, batch, check_equal, compare, model_of, on_disk, reference, train

import actckpt

functional = torch.ops._c10d_functional


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


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_equal_and_collectives_run_once_unless_blocks_run_again(
    kind: str, method: str, ranks: Ranks
) -> None:
    found = ranks.run(compare, __name__, kind, method)
    assert len({ours.in_backward for ours, _ in found}) == 1
    for ours, theirs in found:
        assert ours.in_forward == theirs.in_forward
        if method == "rerun":
            assert ours.in_backward == theirs.in_backward
            assert ours.held_bytes <= theirs.held_bytes
            assert ours.peak_bytes <= 1.1 * theirs.peak_bytes  # what gloo's threads have sent dies when they like
        else:
            assert len(ours.in_backward) == theirs.num_in_backward_of_plain
            assert ours.held_bytes <= theirs.held_bytes + ours.bytes_in_forward


_COLLECTIVES = (functional.all_gather_into_tensor, functional.reduce_scatter_tensor, functional.all_reduce)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks
def test_a_policy_that_moves_collectives_holds_no_more_than_torch_which_repeats_them(kind: str) -> None:
    policy = actckpt.policies.PerOp(dict.fromkeys(_COLLECTIVES, "offload"))
    found = train(KINDS[kind], on_disk(applied(policy)), 3)
    plain, rerun = reference(__name__, kind, "plain"), reference(__name__, kind, "rerun")
    check_equal(found.gradients, plain.gradients)
    assert found.in_backward == plain.in_backward and len(found.in_backward) < len(rerun.in_backward)
    assert found.held_bytes <= rerun.held_bytes
