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

import data_parallel
import torch
import torch.distributed as dist
import training
from training import OURS, Method, Training, compare

DEVICE = "cuda"
BACKEND = "nccl"

aten = torch.ops.aten
training.DEVICE, training.WIDTH, training.ROWS = DEVICE, 128, (8, 64)
training.SAVED += [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]

_OF_RANKS = (
    *("ddp", "ddp, static graph", "fsdp1", "fsdp1, original parameters"),
    *("fsdp2", "fsdp2, no reshard", "fsdp2, mixed precision"),
)
KINDS: dict[str, Callable[[Method], Training]] = {
    **{kind: data_parallel.KINDS[kind] for kind in _OF_RANKS},
    "ddp, buckets are gradients": functools.partial(data_parallel.KINDS["ddp"], gradient_as_bucket_view=True),
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
