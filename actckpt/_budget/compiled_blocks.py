"""Blocks that are compiled: nothing sees their operators, and they run again in backward as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt._budget.structure import BlockStructure
from actckpt._checkpointed_call import checkpoint_call
from actckpt._core import modes
from actckpt._options import CheckpointOptions
from actckpt._replay.audit import site_of_call

__all__ = ["is_compiled", "run_compiled"]

_AGAIN = CheckpointOptions(policy="recompute")
#: What `torch.compile` returned and has run.
_have_run = weakref.WeakSet[Callable[..., Any]]()


def is_compiled(block: torch.nn.Module) -> bool:
    """Return whether a block is compiled, by its method or by `torch.compile`."""
    return block._compiled_call_impl is not None or hasattr(block, "_orig_mod")


def run_compiled(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argument: Tensor | None,
    *,
    offloads: bool,
) -> tuple[Any, BlockStructure]:
    """Run the forward of a compiled block once, as `run_recorded` runs others. Its first call compiles."""
    structure = BlockStructure(argument, offloads=offloads)
    site_of_call(forward, args, kwargs).is_rerun = True  # under each policy
    if forward in _have_run:
        return checkpoint_call(forward, args, kwargs, _AGAIN), structure
    _have_run.add(forward)
    structure.is_measured_later = True
    with modes.without_own():  # below modes, DistributedDataParallel's compiler fails
        return checkpoint_call(forward, args, kwargs, _AGAIN), structure
