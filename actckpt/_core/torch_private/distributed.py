"""Private names of torch for distributed training: process groups, collectives, parameters that FSDP2 shards."""

from datetime import timedelta
from typing import Any

import torch

from actckpt._core.torch_private.optional import optional


def wait_for_collective(tensor: Any) -> None:
    """Wait until the collective that `tensor` stands for has written its bytes.

    torch's functional collectives return such tensors, which wait when an operator takes them.
    """
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor.trigger_wait()


def resolved_group(given: Any) -> Any:
    """Return the process group that operators are given: by its name, as functional collectives are, or in a box."""
    groups: Any = torch.distributed.distributed_c10d
    if isinstance(given, str):
        return groups._resolve_process_group(given)
    return groups.ProcessGroup.unbox(given) if isinstance(given, torch.ScriptObject) else given


def group_store(group: Any) -> Any:
    """Return the key-value store of a process group."""
    getter = optional(group, "get_group_store")  # public, where torch has it
    groups: Any = torch.distributed.distributed_c10d
    return groups._world.pg_map[group][1] if getter is None else getter()


def num_operations(group: Any) -> int | None:
    """Return how many operations a process group ran so far, None: nobody counts them. Gloo counts sends as well."""
    try:
        number: int = group._get_sequence_number_for_group()
    except RuntimeError:  # its backend does not
        return None
    return number


def operations_of_groups() -> tuple[int | None, ...]:
    """Return `num_operations` of each process group, in the order in which they were made."""
    return tuple(map(num_operations, torch.distributed.distributed_c10d._world.pg_map))


def group_timeout(group: Any) -> timedelta:
    """Return how long collectives of a process group wait for other ranks; torch's default where none can be told."""
    options = None
    for device in ("cuda", "cpu"):
        try:
            options = optional(group._get_backend(torch.device(device)), "options")
        except RuntimeError:  # none of its backends is for this device
            continue
        break
    found: timedelta | None = None if options is None else optional(options, "_timeout")
    return torch.distributed.constants.default_pg_timeout if found is None else found


def finished_work() -> Any:
    """Return what a collective of `torch.ops.c10d` returns, as if it had ended."""
    return torch._C._distributed_c10d.FakeWork().boxed()


def unsharded_parameter(owner: object) -> tuple[str, Any] | None:
    """Return name and unsharded tensor of a parameter that FSDP2 manages, if `owner` is what it does so with.

    The module has the sharded parameter in its place most of the time.
    """
    if type(owner).__name__ != "FSDPParam":
        return None
    parameter: Any = owner
    tensor = optional(parameter, "_unsharded_param")  # set by the first gathering
    return None if tensor is None else (parameter._param_fqn or parameter._module_info.param_name, tensor)
