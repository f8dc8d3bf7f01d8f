"""What test_sharded_gpu.py runs in a process with a group of one rank: `python sharded_program.py FILE KIND`.

Trains, compares and counts as tests/distributed does, with the tensors of a GPU; prints one line of JSON per method.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import training
from torch import Tensor, nn
from training import OURS, Block, Method, Training, compare, model_of

DEVICE = "cuda"
BACKEND = "nccl"
_WIDTH = 128

aten = torch.ops.aten
training.SAVED += [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


def _made() -> nn.Module:
    return model_of(width=_WIDTH).to(DEVICE)


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step)
    return torch.randn(8, 64, 8, generator=generator).to(DEVICE)


def _training(model: nn.Module, call: Callable[[Tensor], Tensor]) -> Training:
    return Training(lambda: list(model.parameters()), lambda step: call(_batch(step)).float().square().mean())


def _ddp(method: Method, **options: Any) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    model = _made()
    method(model)
    return _training(model, DistributedDataParallel(model, **options))


def _fsdp1(method: Method, **options: Any) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = _made()
    method(model)
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)
    return _training(sharded, sharded)


def _fsdp2(method: Method, *, is_mixed: bool = False, **options: Any) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if is_mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _made()
    method(model)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _training(model, model)


KINDS: dict[str, Callable[[Method], Training]] = {
    "ddp": _ddp,
    "ddp, static graph": functools.partial(_ddp, static_graph=True),
    "ddp, buckets are gradients": functools.partial(_ddp, gradient_as_bucket_view=True),
    "fsdp1": _fsdp1,
    "fsdp1, original parameters": functools.partial(_fsdp1, use_orig_params=True),
    "fsdp2": _fsdp2,
    "fsdp2, no reshard": functools.partial(_fsdp2, reshard_after_forward=False),
    "fsdp2, mixed precision": functools.partial(_fsdp2, is_mixed=True),
}


def _outcome(kind: str, method: str) -> dict[str, Any]:
    try:
        ours, theirs = compare("sharded_program", kind, method)
    except Exception as error:  # the other methods are run all the same
        return {"error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"error": None, "same collectives": ours.in_backward == theirs.in_backward}
    found |= {"held": [ours.held_bytes, theirs.held_bytes], "peak": [ours.peak_bytes, theirs.peak_bytes]}
    found |= {"collectives": [list(ours.in_backward), list(theirs.in_backward)], "kind": kind}
    return found


def _main(file: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.get_device_module(DEVICE).set_device(0)
    store = dist.FileStore(file, 1)
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    for method in OURS:
        print(json.dumps({"method": method, **_outcome(kind, method)}), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # threads of the backend may outlive it


if __name__ == "__main__":
    _main(*sys.argv[1:])
