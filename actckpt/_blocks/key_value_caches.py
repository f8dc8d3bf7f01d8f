"""Key-value caches of Transformers that a block of an applied model is given: the only file that knows that library.

Models of Transformers make a cache in every forward (`use_cache` is True by default) and hand it to each block, which
appends its keys and values. What is in it lives until backward, which training does not read, and in a forward that
nobody differentiates it leads to the regions that wrote it (NOTE [ Object state ], Rule 3). The library's own
checkpointing takes it away from its layers in training, and checkpoints nothing in evaluation. So does `apply`, for
the same layers, where a cache is given. A cache that holds something stays: reruns find it as their forward did.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from actckpt import _C
from actckpt._core.sites import warn_user
from actckpt.errors import BlocksError

__all__ = ["is_checkpointing_layer", "without_cache"]

#: Which block a cache was taken away from first.
_taken_from: WeakKeyDictionary[Any, "ref[torch.nn.Module]"] = WeakKeyDictionary()
_warned: set[tuple[str, str]] = set()

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def without_cache(
    block: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Return the arguments of one call of a block, without an empty key-value cache among them.

    Args:
        forward: what will be called; its signature tells which argument is `use_cache`.
    Returns:
        None: the block is given a cache in evaluation, and not to be checkpointed.
    Raises:
        BlocksError: the cache was taken away from this block before: somebody trains through it.
    """
    kind = _type("transformers.cache_utils", "Cache")
    if kind is None or not any(isinstance(value, kind) for value in (*args, *kwargs.values())):
        return args, kwargs
    if not is_checkpointing_layer(block) or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs
    if not block.training:
        _warn_once(block, _IN_EVALUATION)
        return None
    names = list(inspect.signature(forward).parameters)[: len(args)]
    rest = args[len(names) :]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    taken = {name: _taken(block, name, value, kind) for name, value in given.items()}
    return (*(taken[name] for name in names), *rest), {name: taken[name] for name in kwargs}


def is_checkpointing_layer(module: torch.nn.Module) -> bool:
    """Whether a module is one of those that the library's own checkpointing checkpoints, as a whole."""
    layer = _type("transformers.modeling_layers", "GradientCheckpointingLayer")
    return layer is not None and isinstance(module, layer)


def _type(module: str, name: str) -> Any:
    """Return a type of a package that may not be loaded, or may be older than the type."""
    return getattr(sys.modules.get(module), name, None)


def _taken(block: torch.nn.Module, name: str, value: Any, kind: Any) -> Any:
    """Return what a block gets instead of one argument."""
    if name == "use_cache":
        return False if value is True else value
    if not isinstance(value, kind) or not _is_empty(value):
        return value
    first = _taken_from.get(value)
    if first is None:
        _taken_from[value] = ref(block)
    elif first() is block and not _C.is_rerunning():
        raise BlocksError(_words_of_second_call(block, value))
    _warn_once(block, _IN_TRAINING)
    return None


def _is_empty(cache: Any) -> bool:
    """Whether nothing was written to a cache. Asks no device: only shapes."""
    tensors = _C.Structure((cache,), set(), []).take_tensors()
    return not any(tensor.dim() > 1 and tensor.numel() > 0 for tensor in tensors)


def _warn_once(block: torch.nn.Module, what: str) -> None:
    kind = type(block).__name__
    if (kind, what) not in _warned:
        _warned.add((kind, what))
        warn_user(f"apply: {kind} is given a key-value cache. {what} {_WAYS_OUT}")


_IN_TRAINING = (
    "It is taken away: training does not read it, and it would hold the keys and values of every block until backward "
    "(Transformers' own gradient checkpointing takes it away too)."
)
_IN_EVALUATION = (
    "In evaluation such a block runs without being checkpointed, as with Transformers' own gradient checkpointing."
)
_WAYS_OUT = (
    "Pass use_cache=False or set model.config.use_cache = False, which also silences this; to train through the cache, "
    "pass apply any policy but 'recompute'."
)


def _words_of_second_call(block: torch.nn.Module, cache: Any) -> str:
    return (
        f"apply: {type(block).__name__} is given a {type(cache).__name__} for the second time, and it is empty: it was "
        f"taken away from the blocks in the first call.\n{_WAYS_OUT}"
    )
