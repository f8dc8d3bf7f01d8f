"""A block call that runs again in isolation, and its times: plain, replayed and rerun."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actckpt._budget.fake_collectives import FakeCollectives
from actckpt._budget.isolated_block import LEAF, isolate, nodes_behind, with_trained_input
from actckpt._budget.structure import BlockStructure
from actckpt._budget.timing import Run, Times, fastest
from actckpt._checkpointed_call import checkpoint_call
from actckpt._core import devices
from actckpt._options import CheckpointOptions
from actckpt._replay.calls import RegionOptions
from actckpt.planner.costs import Value
from actckpt.policies import Policy

__all__ = ["BlockCall", "block_times"]

_BLOCK = RegionOptions(is_block=True)


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


def block_times(call: BlockCall, values: tuple[Value, ...], no_rerun: str | None) -> tuple[Times, str | None]:
    """Return the times of a block, and why it must not be rerun.

    Args:
        no_rerun: why it must not, if that is known.
    """
    device = call.structure.device
    is_host = devices.accelerator_of(device.type) is None
    recorded = functools.partial(call.isolate, call.in_region([]))
    rerun = functools.partial(call.isolate, call.in_region("recompute"))
    num_offloadable = 0 if is_host else sum(value.offloadable for value in values)
    timed = functools.partial(fastest, call.isolate, recorded=recorded, device=device, num_offloadable=num_offloadable)
    if no_rerun is None:
        # A block that runs other operators each time fails in a rerun, as does one that cannot run in backward: it is
        # planned without reruns. A block that fails without a rerun, or because a failed rerun left state behind, fails
        # again.
        try:
            return timed(rerun=rerun), None
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), "").rstrip(".")
            no_rerun = f"it failed with {type(error).__name__}: {first_line}"
    return timed(rerun=None), no_rerun
