"""A block call that runs again in isolation, to be measured."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actckpt._budget.fake_collectives import FakeCollectives
from actckpt._budget.isolated_block import LEAF, isolate, nodes_behind, with_trained_input
from actckpt._budget.structure import BlockStructure
from actckpt._budget.timing import Run
from actckpt._checkpointed_call import checkpoint_call
from actckpt._options import CheckpointOptions
from actckpt._replay.calls import RegionOptions
from actckpt.policies import Policy

__all__ = ["BlockCall"]

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
