"""DDP, FSDP and HSDP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import training
from pool import NUM_RANKS
from torch import Tensor, nn
from training import Block, Method, Training, batch, model_of


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
