"""Private names of torch for distributed training: process groups, collectives, parameters that FSDP2 shards."""

from datetime import timedelta
from typing import Any

import torch

from actckpt._core.torch_private.lookup import attribute, lookup

_groups = lookup("torch.distributed.distributed_c10d")
_group_by_name = lookup("torch.distributed.distributed_c10d._resolve_process_group")
_world = lookup("torch.distributed.distributed_c10d._world")
_fake_work = lookup("torch._C._distributed_c10d.FakeWork")


def wait_for_collective(tensor: Any) -> None:
    """Wait until the collective that `tensor` stands for has written its bytes.

    torch's functional collectives return such tensors, which wait when an operator takes them.
    """
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor.trigger_wait()


def resolved_group(given: Any) -> Any:
    """Return the process group that operators are given: by its name, as functional collectives are, or in a box."""
    if isinstance(given, str):
        return _group_by_name(given)
    return _groups.ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else given


def group_store(group: Any) -> Any:
    """Return the key-value store of a process group."""
    getter = getattr(group, "get_group_store", None)  # public, where torch has it
    return attribute(_world, "pg_map")[group][1] if getter is None else getter()


def num_operations(group: Any) -> int | None:
    """Return how many operations a process group ran so far, None: nobody counts them. Gloo counts sends as well."""
    count = attribute(group, "_get_sequence_number_for_group")
    try:
        number: int = count()
    except RuntimeError:  # its backend does not
        return None
    return number


def operations_of_groups() -> tuple[int | None, ...]:
    """Return `num_operations` of each process group; None where its backend, like NCCL, does not count sends."""
    groups = attribute(_world, "pg_map")
    return tuple(num_operations(group) if name == "gloo" else None for group, (name, _) in groups.items())


def group_timeout(group: Any) -> timedelta:
    """Return how long collectives of a process group wait for other ranks; torch's default where none can be told."""
    options, backend_for = None, attribute(group, "_get_backend")
    for device in ("cuda", "cpu"):
        try:
            options = getattr(backend_for(torch.device(device)), "options", None)
        except RuntimeError:  # none of its backends is for this device
            continue
        break
    found: timedelta | None = getattr(options, "_timeout", None)
    return torch.distributed.constants.default_pg_timeout if found is None else found


def finished_work() -> Any:
    """Return what a collective of `torch.ops.c10d` returns, as if it had ended."""
    return _fake_work().boxed()
