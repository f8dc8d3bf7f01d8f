"""Private names of torch for distributed training: process groups, collectives, parameters that FSDP2 shards."""

from typing import Any

from actckpt._core.torch_private.lookup import attribute, lookup

_world = lookup("torch.distributed.distributed_c10d._world")
_fake_work = lookup("torch._C._distributed_c10d.FakeWork")


def wait_for_collective(tensor: Any) -> None:
    """Wait until the collective that `tensor` stands for has written its bytes.

    torch's functional collectives return such tensors, which wait when an operator takes them.
    """
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor.trigger_wait()


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


def finished_work() -> Any:
    """Return what a collective of `torch.ops.c10d` returns, as if it had ended."""
    return _fake_work().boxed()
