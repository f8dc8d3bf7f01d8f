"""Replacements for collectives while a block runs in isolation.

NOTE [ Fake collectives ]

Ranks profile different blocks at different times, and plans differ. A collective that only one rank runs would hang, or
be matched with the next one; gradients would then be silently wrong. So profiling does not communicate, and no plan
reruns a block with collectives, or names a collective; replay keeps their results.

In runs for profiling, each collective returns at once what this rank sends, repeated or cut to the size that is
received. Integers, which may determine sizes (how many tokens go to which expert), are those that the recorded call
received. An unknown collective raises: no other rank would receive what it sends.

`actckpt.plan` runs whole steps as often as it must. If the first one communicates, it raises after that step, which all
ranks have run once. Blocks that would gather sharded parameters once more are not profiled: that is an error.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from actckpt._core import ranks, torch_private
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.storages import tensors_in
from actckpt.errors import BlocksError

__all__ = ["Exchanges", "FakeCollectives", "check_units", "check_wrapped", "num_ranks"]

#: FSDP's own operators that communicate call operators of these.
_EXCHANGES = ranks.COLLECTIVE_NAMESPACES - {"fsdp"}
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})
#: Those that return new tensors, whose sizes they tell for meta tensors.
_FUNCTIONAL = ("_c10d_functional", "c10d_functional")


def num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _exchanges(func: Any) -> bool:
    namespace, _, name = func._schema.name.partition("::")
    return namespace in _EXCHANGES and name not in _LOCAL


def _received(func: Any, args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """Return the integer tensors that a collective wrote or returned."""
    written = args[:1] if func.namespace == "c10d" else ()
    return [tensor for tensor in tensors_in((written, result)) if not tensor.is_floating_point()]


class Exchanges(ObservingMode):
    """Records what a block receives from other ranks, and whether it gathers sharded parameters inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._received: list[list[Tensor]] = []
        #: The integers of each collective, in order.
        self.integers: list[list[Tensor]] = []
        self.has_units = False

    @property
    def is_empty(self) -> bool:
        """Whether there was no communication."""
        return not self._received and not self.integers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # its inner operators come here
        result = func(*args, **(kwargs or {}))
        self.has_units = self.has_units or func.namespace == "fsdp"
        if _exchanges(func):
            self._received.append(_received(func, args, result))
        return result

    def close(self) -> None:
        """Copy what was received; all of it has arrived."""
        self.integers = [[tensor.clone() for tensor in tensors] for tensors in self._received]
        self._received = []


class FakeCollectives(ObservingMode):
    """Prevents communication with other ranks (NOTE [ Fake collectives ])."""

    def __init__(self, exchanges: Exchanges) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._integers = iter(exchanges.integers)
        self._without_others = ranks.on_this_rank_only()

    def __enter__(self) -> Any:
        self._without_others.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            self._without_others.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if not _exchanges(func):
            return func(*args, **(kwargs or {}))
        result = _local_result(func, args)
        for mine, recorded in zip(_received(func, args, result), next(self._integers, ()), strict=False):
            if mine.shape == recorded.shape:
                mine.copy_(recorded)
        return result


def _local_result(func: Any, args: tuple[Any, ...]) -> Any:
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "c10d":  # outputs come first; they are returned unless only a Work is
        returns = [str(returned.type) for returned in func._schema.returns]
        work = torch_private.finished_work()
        return (args[0], work) if len(returns) == 2 else work if returns else None
    if namespace not in _FUNCTIONAL or name.endswith("_out"):
        raise NotImplementedError(f"{func} exchanges tensors with other ranks, and it is not known how large they are")
    if name.endswith("_"):
        return args[0]
    sent, *others = args
    if isinstance(sent, Tensor):
        return _repeated(sent, func(sent.to("meta"), *others))
    return list(map(_repeated, sent, func([tensor.to("meta") for tensor in sent], *others)))


def _repeated(sent: Tensor, received: Tensor) -> Tensor:
    """Return a tensor of the size that is received, from what is sent."""
    flat, numel = sent.flatten() if sent.numel() else sent.new_zeros(1), received.numel()
    return flat.repeat(-(-numel // len(flat)))[:numel].reshape(received.shape)


def check_units(name: str, exchanges: Exchanges) -> None:
    """Raise if modules inside a block gathered their own parameters (FSDP2)."""
    if exchanges.has_units:
        raise BlocksError(
            f"block {name!r} has modules that FSDP2 shards, and cannot be profiled on its own: that would gather their "
            "parameters once more. Shard the blocks themselves (fully_shard(block)), pass these modules as blocks=, or "
            "a policy in place of a budget."
        )


def check_wrapped(name: str, block: torch.nn.Module) -> None:
    """Raise if modules of a block are wrapped by FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever wraps with it
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in block.modules()):
        raise BlocksError(
            f"block {name!r} has modules that FullyShardedDataParallel wraps, and cannot be profiled on its own: that "
            "would gather their parameters once more. Call apply first and then wrap the blocks, or pass a policy in "
            "place of a budget."
        )
