"""Compiled blocks: their operators are not visible, so they are rerun in backward as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt._budget.structure import BlockStructure
from actckpt._checkpointed_call import checkpoint_call
from actckpt._core import modes, torch_private
from actckpt._core.storages import tensors_in
from actckpt._options import CheckpointOptions
from actckpt._replay.call_sites import site_of_call

__all__ = ["is_compiled", "run_compiled"]

_AGAIN = CheckpointOptions(policy="recompute")
#: Results of `torch.compile` that have run, with the input shapes if these matter.
_have_run = weakref.WeakKeyDictionary[Callable[..., Any], set[tuple[torch.Size, ...]]]()


def is_compiled(block: torch.nn.Module) -> bool:
    """Return whether a block is compiled, by its method or by `torch.compile`."""
    return torch_private.call_of_compiled(block) is not None or hasattr(block, "_orig_mod")


def run_compiled(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argument: Tensor | None,
    *,
    offloads: bool,
) -> tuple[Any, BlockStructure]:
    """Run the forward of a compiled block once, as `run_recorded` runs others.

    The first call compiles. Below a mode, that fails with DistributedDataParallel, for each new shape.
    """
    structure = BlockStructure(argument, offloads=offloads)
    site_of_call(forward, args, kwargs).is_rerun = True  # under each policy
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    shapes = tuple(tensor.shape for tensor in tensors_in((args, kwargs))) if is_distributed else ()
    known = _have_run.setdefault(forward, set())
    if shapes in known:
        return checkpoint_call(forward, args, kwargs, _AGAIN), structure
    known.add(shapes)
    structure.is_measured_later = True
    with modes.without_own():
        return checkpoint_call(forward, args, kwargs, _AGAIN), structure
