"""A block call that runs again in isolation, and its times: plain, replayed, rerun, and with offloaded values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actckpt._budget.fake_collectives import FakeCollectives
from actckpt._budget.isolated_block import LEAF, isolate, nodes_behind, with_trained_input
from actckpt._budget.structure import BlockStructure
from actckpt._budget.timing import Offloading, Run, Times, fastest
from actckpt._checkpointed_call import checkpoint_call
from actckpt._core import devices
from actckpt._options import CheckpointOptions
from actckpt._replay.calls import RegionOptions
from actckpt.action import Action
from actckpt.planner.costs import BLOCK_INPUT, Value
from actckpt.policies import Policy

__all__ = ["BlockCall", "block_times"]

_BLOCK = RegionOptions(is_block=True)
#: Maximum bytes offloaded, unless one value has more.
_MOVED_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """A recorded block call that can run again in isolation (see `profiling`)."""

    name: str
    block: torch.nn.Module
    forward: Callable[..., Any]
    #: args and kwargs
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    structure: BlockStructure

    @contextlib.contextmanager
    def isolate(self, forward: Callable[..., Any] | None = None) -> Iterator[Run]:
        """Isolate the block for one run of its forward, or of `forward` instead."""
        outside = self.structure.written, self.structure.generators.values()
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        communication = FakeCollectives(self.structure.exchanges) if is_distributed else contextlib.nullcontext()
        with isolate(self.block, self.arguments, *outside) as ((args, kwargs), leaves), communication:
            yield Run(forward or self.forward, args, kwargs, leaves)

    def in_region(self, policy: Policy) -> Callable[..., Any]:
        """Return a forward that runs like a block whose plan has this policy."""
        options = CheckpointOptions(policy=policy)
        return lambda *args, **kwargs: checkpoint_call(self.forward, args, kwargs, options, inside=_BLOCK)

    def in_stack(
        self,
        result: Any,
        as_found: Callable[[], contextlib.AbstractContextManager[object]],
        known: dict[Any, bool],
        key: Any,
    ) -> BlockCall:
        """Return the call with an input that needs a gradient, if backward is the same but for that gradient.

        Args:
            as_found: a context in which containers are as the forward found them.
            known: whether it is, by `key`; a forward of the block shows it.
        """
        arguments = with_trained_input(self.arguments, result)
        if arguments is self.arguments:
            return self
        trained = dataclasses.replace(self, arguments=arguments)
        if key not in known:
            with as_found():
                known[key] = trained._has_graph(nodes_behind(result) + Counter({LEAF: 1}))
        return trained if known[key] else self

    def _has_graph(self, expected: Counter[str]) -> bool:
        """Return whether the graph of the block's result has these nodes."""
        try:
            with self.isolate() as run:
                return nodes_behind(run.call()) == expected
        except Exception:  # it refuses such an input
            return False


def block_times(
    call: BlockCall, values: tuple[Value, ...], recorded: tuple[Value, ...], no_rerun: str | None
) -> tuple[Times, str | None]:
    """Return the times of a block, and why it must not be rerun.

    Args:
        recorded: the values by their places in the model.
        no_rerun: why it must not, if that is known.
    """
    device, moved = call.structure.device, _moved(recorded)
    policies: tuple[Policy, ...] = ([], "recompute", moved)
    ways = [functools.partial(call.isolate, call.in_region(policy)) for policy in policies]
    offloading = None
    if moved and devices.accelerator_of(device.type) is not None:
        num_moved = sum(action is Action.OFFLOAD for action in moved.values())
        offloading = Offloading(ways[2], num_moved, sum(value.offloadable for value in values))
    timed = functools.partial(
        fastest,
        call.isolate,
        recorded=ways[0],
        device=device,
        num_values=len(values),
        offloading=offloading,
    )
    if no_rerun is None:
        # A block that runs other operators each time fails in a rerun, as does one that cannot run in backward: it is
        # planned without reruns. A block that fails without a rerun, or because a failed rerun left state behind, fails
        # again.
        try:
            return timed(rerun=ways[1]), None
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "").rstrip(".")
            no_rerun = f"it failed with {type(error).__name__}: {first_line}"
    return timed(rerun=None), no_rerun


def _moved(values: tuple[Value, ...]) -> dict[str, Action]:
    """Return a policy, by places, that offloads the smallest values and keeps the rest; may be empty."""
    may = sorted((v for v in values if v.offloadable and v.name != BLOCK_INPUT), key=lambda value: value.nbytes)
    total = itertools.accumulate(value.nbytes for value in may)
    some = {value.name for value, nbytes in zip(may, total, strict=True) if value is may[0] or nbytes <= _MOVED_BYTES}
    names = (value.name for value in values if value.needed and value.name != BLOCK_INPUT)
    return {name: Action.OFFLOAD if name in some else Action.KEEP for name in names} if some else {}
