"""Private names of torch for distributed training: process groups, collectives, parameters that FSDP2 shards."""

from typing import Any

from actckpt._core.torch_private.lookup import attribute, lookup

_world = lookup("torch.distributed.distributed_c10d._world")
_fake_work = lookup("torch._C._distributed_c10d.FakeWork")


def wait_for_collective(tensor: Any) -> None:
    """Wait until the collective behind `tensor` has written its bytes.

    torch's functional collectives return such tensors; operators wait for them.
    """
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor.trigger_wait()


def num_operations(group: Any) -> int | None:
    """Return how many operations a process group has run, None: not counted. Gloo counts sends as well."""
    count = attribute(group, "_get_sequence_number_for_group")
    try:
        number: int = count()
    except RuntimeError:  # not supported by its backend
        return None
    return number


def operations_of_groups() -> tuple[int | None, ...]:
    """Return `num_operations` of each process group; None for backends that, like NCCL, do not count sends."""
    groups = attribute(_world, "pg_map")
    return tuple(num_operations(group) if name == "gloo" else None for group, (name, _) in groups.items())


def finished_work() -> Any:
    """Return the result of a `torch.ops.c10d` collective that has already finished."""
    return _fake_work().boxed()
