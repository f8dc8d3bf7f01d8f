"""DDP, FSDP and HSDP: the gradients of plain training, and no more bytes and collectives than torch's checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from pool import NUM_RANKS, Ranks, on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import OURS, Block, Method, Training, batch, check_equal, compare, model_of, reference, train

import actckpt


def _training(model: nn.Module, call: Callable[[Tensor], Tensor]) -> Training:
    return Training(lambda: list(model.parameters()), lambda step: call(batch(step)).square().mean())


def _ddp(method: Method, **options: Any) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    model = model_of()
    method(model)
    return _training(model, DistributedDataParallel(model, **options))


def _fsdp2(method: Method, *, is_applied_first: bool = True, **options: Any) -> Training:
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    if is_applied_first:
        method(model)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if not is_applied_first:
        method(model)
    return _training(model, model)


def _fsdp2_mixed(method: Method) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return _fsdp2(method, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def _hsdp(method: Method) -> Training:
    from torch.distributed.device_mesh import init_device_mesh

    return _fsdp2(method, mesh=init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("replicas", "shards")))


def _fsdp1(method: Method, **options: Any) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = model_of()
    method(model)
    options |= {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device(training.DEVICE)}
    sharded = FullyShardedDataParallel(model, **options)
    return _training(sharded, sharded)


def _accumulating(method: Method) -> Training:
    """Two backwards per step, the first one without communication."""
    from torch.nn.parallel import DistributedDataParallel

    model = model_of()
    method(model)
    replica = DistributedDataParallel(model)

    def forward(step: int) -> Tensor:
        with replica.no_sync():
            replica(batch(2 * step)).square().mean().backward()
        return replica(batch(2 * step + 1)).square().mean()

    return Training(lambda: list(model.parameters()), forward)


def _with_unused(method: Method) -> Training:
    """Each rank leaves another block out."""
    from torch.nn.parallel import DistributedDataParallel

    model = model_of()
    method(model)
    model.left_out = 1 + dist.get_rank()
    return _training(model, DistributedDataParallel(model, find_unused_parameters=True))


KINDS: dict[str, Callable[[Method], Training]] = {
    "ddp": _ddp,
    "ddp, static graph": functools.partial(_ddp, static_graph=True),
    "ddp, unused parameters": _with_unused,
    "ddp, accumulation": _accumulating,
    "fsdp2": _fsdp2,
    "fsdp2, patched after": functools.partial(_fsdp2, is_applied_first=False),
    "fsdp2, no reshard": functools.partial(_fsdp2, reshard_after_forward=False),
    "fsdp2, mixed precision": _fsdp2_mixed,
    "hsdp": _hsdp,
    "fsdp1": _fsdp1,
    "fsdp1, original parameters": functools.partial(_fsdp1, use_orig_params=True),
}


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_equal_and_bytes_and_collectives_no_more(kind: str, method: str, ranks: Ranks) -> None:
    for ours, theirs in ranks.run(compare, __name__, kind, method):
        assert ours.in_backward == theirs.in_backward and ours.in_forward == theirs.in_forward
        assert ours.held_bytes <= theirs.held_bytes
        assert ours.peak_bytes <= 1.05 * theirs.peak_bytes  # what gloo's threads have sent dies when they like


def _wrapped(checkpoint_fn: Any) -> Method:
    """Return what FSDP's users write: blocks in wrappers that call `checkpoint_fn`."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

    def method(model: nn.Module) -> None:
        wrap = functools.partial(wrappers.checkpoint_wrapper, checkpoint_fn=checkpoint_fn, use_reentrant=False)
        wrappers.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, Block)
        )

    return method


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
@on_ranks
def test_checkpoint_is_a_checkpoint_fn_of_torchs_wrappers(kind: str) -> None:
    ours, theirs = (train(KINDS[kind], _wrapped(function), 3) for function in (actckpt.checkpoint, checkpoint))
    check_equal(ours.gradients, reference(__name__, kind, "plain").gradients)
    assert (ours.in_forward, ours.in_backward) == (theirs.in_forward, theirs.in_backward)
    assert ours.held_bytes <= theirs.held_bytes and ours.peak_bytes <= theirs.peak_bytes


@on_ranks
def test_a_region_around_several_units_of_fsdp2_says_what_to_do() -> None:
    def around(model: nn.Module) -> None:
        own = model.forward

        def forward(x: Tensor) -> Tensor:
            with actckpt.region():
                result: Tensor = own(x)
            return result

        model.forward = forward  # type: ignore[method-assign]

    message = r"(?s)of shape .* has 0 bytes now.*FSDP2 frees.*inside each unit"
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match=message):
        train(_fsdp2, around, 1)
