"""Modules outside of the repeated blocks that become blocks of their own: pooling, norms, transitions, a head.

The first cycle under a budget shows what such modules hold besides their results. With `blocks=None`, those that hold
a notable share of the cycle's activations are checkpointed from the next cycle on, and measured as blocks.

The user did not ask for these, so only modules are added for which a second run changes nothing else: called once, from
the model's own forward, with results of other modules (the program may overwrite its own inputs before backward),
without hooks or compiled parts inside, and in a process without ranks. A module that cannot be profiled, or that later
runs inside of another block, is no block any more.
"""

from __future__ import annotations

import torch

from actckpt._blocks.applied import CheckpointedForward, forwards_in, patch, unpatch_one
from actckpt._budget.compiled_blocks import is_compiled
from actckpt._budget.running import RECOMPUTE
from actckpt._cycles.timeline import Cycle

__all__ = ["AddedBlocks"]

#: The minimum share of a cycle's activations that a module holds besides its results.
_LEAST_SHARE = 0.05
#: Attributes of a module with its hooks.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class AddedBlocks:
    """Adds large modules to the blocks of a model.

    Args:
        forwards: of the blocks, by name. Added modules are added here.
        is_on: whether to add any; false if the user named the blocks.
    """

    def __init__(self, model: torch.nn.Module, forwards: dict[str, CheckpointedForward], *, is_on: bool) -> None:
        self._model, self._forwards, self._is_on = model, forwards, is_on
        self._names, self._rejected = set[str](), set[str]()
        self._has_changed = False

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, cycle: Cycle) -> bool:
        """A measured cycle has ended: add what is large in it. Return whether the blocks are others than before."""
        modules = {} if cycle.is_void or not cycle.num_backwards or not self._is_on else self._large(cycle)
        if modules:
            group = next(iter(self._forwards.values())).group
            patch(modules, dict.fromkeys(modules, RECOMPUTE), self._model, group)
            self._forwards |= forwards_in(modules)
            self._names |= modules.keys()
            for forward in forwards_in(modules).values():
                forward.has_run = True
        has_changed, self._has_changed = self._has_changed or bool(modules), False
        return has_changed

    def _large(self, cycle: Cycle) -> dict[str, torch.nn.Module]:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return {}
        least_bytes = _LEAST_SHARE * (cycle.peak_bytes - cycle.static_bytes)
        names = [row.name for row in cycle.made_outside if row.is_alone and row.inner_bytes > least_bytes]
        modules = {name: self._model.get_submodule(name) for name in names if name not in self._rejected}
        return {name: module for name, module in modules.items() if _can_be_block(module)}

    def rejects(self, name: str) -> bool:
        """A block runs inside of another one; return whether that was added, and so is no block any more."""
        if name in self._names:
            self.reject(name)
        return name in self._rejected

    def reject(self, name: str) -> None:
        """An added module cannot be profiled: it is no block any more."""
        if name not in self._names:
            return
        self._names.remove(name)
        self._rejected.add(name)
        self._has_changed = True
        forward = self._forwards.pop(name)
        forward.group.forwards.pop(name)
        unpatch_one(forward.block)


def _can_be_block(module: torch.nn.Module) -> bool:
    """Whether a module does nothing that a second run, or another `forward`, might disturb."""
    is_patched = "forward" in vars(module) or type(module).__setattr__ is not torch.nn.Module.__setattr__
    parts = list(module.modules())
    return not is_patched and not any(map(is_compiled, parts)) and not any(map(_has_hooks, parts[1:]))


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(vars(module).get(name) for name in _HOOKS)
