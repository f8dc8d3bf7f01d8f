"""What stands for other ranks while a block runs on its own.

NOTE [ Fake collectives ]

Ranks profile other blocks at other times, and plans differ. A collective that one rank runs and another one does not
would wait for ever, or be taken for the next one: gradients would be wrong without a word. So profiling exchanges
nothing, and no plan makes a block with collectives run again, or names one; replay keeps what they return.

Rule 1. In runs for profiling each collective returns at once what it would if the other ranks had sent what this one
        sends; where that has another size, zeros.
Rule 2. Integers, on which sizes depend (how many tokens go to which expert), are what the recorded call received.
Rule 3. What is not known to be a collective of some form raises: nothing is sent that nobody waits for.
Rule 4. Where a forward and its backward met no collective, later runs of the same block are not watched for any.
Rule 5. `actckpt.plan`, which runs whole steps as often as it must, raises after the first one where that exchanges
        something: all ranks have run it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actckpt._core import ranks, torch_private
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.storages import tensors_in

__all__ = ["Exchanges", "FakeCollectives", "num_ranks"]

#: Those of FSDP's own operators that talk to other ranks call these.
_EXCHANGES = ranks.COLLECTIVE_NAMESPACES - {"fsdp"}
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})


def num_ranks() -> int:
    """Return how many ranks train."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _gathered(x: Tensor, num_ranks: int, *_: object) -> Tensor:
    return torch.cat([x] * num_ranks)


def _scattered(x: Tensor, _: str, num_ranks: int, *__: object) -> Tensor:
    return x[: x.shape[0] // num_ranks].clone()


def _sent_to_all(x: Tensor, output_sizes: Sequence[int], *_: object) -> Tensor:
    return x.new_zeros(sum(output_sizes), *x.shape[1:]) if output_sizes else x.clone()


def _copied(x: Tensor, *_: object) -> Tensor:
    return x.clone()


def _itself(x: Any, *_: object) -> Any:
    return x


def _each(of: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda inputs, *rest: [of(x, *rest) for x in inputs]


#: What functional collectives return, by their names.
_RESULTS: dict[str, Callable[..., Any]] = {
    "all_reduce": _copied,
    "all_reduce_": _itself,
    "all_reduce_coalesced": _each(_copied),
    "all_reduce_coalesced_": _itself,
    "all_gather_into_tensor": _gathered,
    "all_gather_into_tensor_coalesced": _each(_gathered),
    "reduce_scatter_tensor": _scattered,
    "reduce_scatter_tensor_coalesced": _each(_scattered),
    "all_to_all_single": _sent_to_all,
    "broadcast": _copied,
    "broadcast_": _itself,
}


def _exchanges(func: Any) -> bool:
    namespace, _, name = func._schema.name.partition("::")
    return namespace in _EXCHANGES and name not in _LOCAL


def _received(func: Any, args: tuple[Any, ...], result: Any) -> list[Tensor]:
    """Return the integers among what a collective wrote or returned."""
    written = args[:1] if func.namespace == "c10d" else ()
    return [tensor for tensor in tensors_in((written, result)) if not tensor.is_floating_point()]


class Exchanges(ObservingMode):
    """Notes what a block receives from other ranks, and whether it gathers parameters that are sharded inside of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._received: list[list[Tensor]] = []
        #: Of each collective, in their order, the integers.
        self.integers: list[list[Tensor]] = []
        self.has_units = False
        #: Whether a run on its own met a collective, in forward or backward.
        self.were_met = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was exchanged."""
        return not self._received and not self.integers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the operators inside of it come here
        result = func(*args, **(kwargs or {}))
        self.has_units = self.has_units or func.namespace == "fsdp"
        if _exchanges(func):
            self._received.append(_received(func, args, result))
        return result

    def close(self) -> None:
        """Copy what was received, all of which has arrived."""
        self.integers = [[tensor.clone() for tensor in each] for each in self._received]
        self._received = []


class FakeCollectives(ObservingMode):
    """Exchanges nothing with other ranks (NOTE [ Fake collectives ])."""

    def __init__(self, exchanges: Exchanges) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exchanges, self._integers = exchanges, iter(exchanges.integers)
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
        self._exchanges.were_met = True
        result = _alone(func, args)
        for mine, found in zip(_received(func, args, result), next(self._integers, ()), strict=False):
            if mine.shape == found.shape:
                mine.copy_(found)
        return result


def _alone(func: Any, args: tuple[Any, ...]) -> Any:
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "c10d":  # outputs come first, and are returned if anything but a Work is
        returns = [str(each.type) for each in func._schema.returns]
        work = torch_private.finished_work()
        return (args[0], work) if len(returns) == 2 else work if returns else None
    if name not in _RESULTS or namespace == "_dtensor":
        raise NotImplementedError(f"{func} exchanges tensors with other ranks, and it is not known how large they are")
    return _RESULTS[name](*args)
