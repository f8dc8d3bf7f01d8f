"""Modules outside of the repeated blocks that become blocks of their own: a stem, transitions, a head.

The first cycles under a budget show what such modules hold besides their results. With `blocks=None`, those that hold
a notable share of a cycle's activations are checkpointed from the next cycle on, and measured as blocks.
"""

from __future__ import annotations

import torch

from actckpt._blocks.applied import CheckpointedForward, forwards_in, patch, unpatch_one
from actckpt._budget.compiled_blocks import is_compiled
from actckpt._budget.running import RECOMPUTE
from actckpt._budget.sharded import check_wrapped
from actckpt._cycles.timeline import Cycle
from actckpt.errors import BlocksError

__all__ = ["AddedBlocks"]

#: The minimum share of a cycle's activations that a module holds besides its results.
_LEAST_SHARE = 0.05


class AddedBlocks:
    """Adds large modules to the blocks of a model.

    Args:
        forwards: of the blocks, by name. Added modules are added here.
        is_on: whether to add any; false if the user named the blocks.
    """

    def __init__(self, model: torch.nn.Module, forwards: dict[str, CheckpointedForward], *, is_on: bool) -> None:
        self._model, self._forwards, self._is_on = model, forwards, is_on
        self._names: set[str] = set()
        #: Modules that were added and could not be profiled.
        self._rejected: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, cycle: Cycle) -> bool:
        """A measured cycle has ended: add what is large in it. Return whether any module was added."""
        least_bytes = _LEAST_SHARE * (cycle.peak_bytes - cycle.static_bytes)
        if not self._is_on or cycle.is_void or not cycle.num_backwards:
            return False
        names = [row.name for row in cycle.made_outside if row.name and row.inner_bytes > least_bytes]
        modules = {name: self._model.get_submodule(name) for name in names if name not in self._rejected}
        modules = {name: module for name, module in modules.items() if _can_be_block(name, module)}
        if not modules:
            return False
        together = next(iter(self._forwards.values())).together
        patch(modules, dict.fromkeys(modules, RECOMPUTE), self._model, together)
        self._forwards |= forwards_in(modules)
        self._names |= modules.keys()
        return True

    def reject(self, name: str) -> None:
        """An added module cannot be profiled: it is no block any more."""
        self._names.remove(name)
        self._rejected.add(name)
        forward = self._forwards.pop(name)
        forward.together.forwards.pop(name)
        unpatch_one(forward.block)


def _can_be_block(name: str, module: torch.nn.Module) -> bool:
    try:
        check_wrapped(name, module)
    except BlocksError:
        return False
    return not is_compiled(module)
