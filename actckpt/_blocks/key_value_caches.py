"""Key-value caches of Transformers passed to blocks of an applied model: the only file that uses that library.

Transformers models create a cache in every forward (`use_cache` is True by default) and pass it to each block, which
appends keys and values. Training does not read the cache, but it keeps its contents alive until backward. In a forward
without backward it refers to the regions that wrote it (NOTE [ Inputs of a region ], Rule 3). The library's own
checkpointing removes the cache from the arguments of its layers in training, and does not checkpoint in evaluation.
`apply` does the same for the same layers. A non-empty cache stays: a rerun of a block that fills it raises.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core.reachable import Reached, reachable
from actckpt._core.sites import warn_once
from actckpt._core.warning_texts import WarningText
from actckpt.errors import BlocksError

__all__ = ["is_checkpointing_layer", "without_cache"]

#: The block from whose arguments a cache was first removed.
_taken_from: WeakKeyDictionary[Any, "ref[torch.nn.Module]"] = WeakKeyDictionary()

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def without_cache(
    block: torch.nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments | None:
    """Return the arguments of a block call without an empty key-value cache.

    Args:
        forward: the function to be called; its signature shows which argument is `use_cache`.
    Returns:
        None: the block gets a cache in evaluation, and must not be checkpointed.
    Raises:
        BlocksError: the cache was removed for this block before: someone trains through it.
    """
    kind = _type("transformers.cache_utils", "Cache")
    if kind is None or not any(isinstance(value, kind) for value in (*args, *kwargs.values())):
        return args, kwargs
    if not is_checkpointing_layer(block) or getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs
    if not block.training:
        _warn(_IN_EVALUATION, block)
        return None
    names = list(inspect.signature(forward).parameters)[: len(args)]
    rest = args[len(names) :]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    taken = {name: _taken(block, name, value, kind) for name, value in arguments.items()}
    return (*(taken[name] for name in names), *rest), {name: taken[name] for name in kwargs}


def is_checkpointing_layer(module: torch.nn.Module) -> bool:
    """Whether a module is one that the library's own checkpointing wraps as a whole."""
    layer = _type("transformers.modeling_layers", "GradientCheckpointingLayer")
    return layer is not None and isinstance(module, layer)


def _type(module: str, name: str) -> Any:
    """Return a type of a package that may not be imported, or may lack the type."""
    return getattr(sys.modules.get(module), name, None)


def _taken(block: torch.nn.Module, name: str, value: Any, kind: Any) -> Any:
    """Return the replacement for one argument of a block."""
    if name == "use_cache":
        return False if value is True else value
    if not isinstance(value, kind) or not _is_empty(value):
        return value
    first = _taken_from.get(value)
    if first is None:
        _taken_from[value] = ref(block)
    elif first() is block and not _C.is_rerunning():
        raise BlocksError(_words_of_second_call(block, value))
    _warn(_IN_TRAINING, block)
    return None


def _is_empty(cache: Any) -> bool:
    """Whether a cache is empty. Reads only shapes, so it does not wait for a device."""
    found = (reached.value for reached in reachable([Reached("", cache)]))
    return not any(isinstance(each, Tensor) and each.dim() > 1 and each.numel() > 0 for each in found)


def _warn(text: WarningText, block: torch.nn.Module) -> None:
    name = type(block).__name__
    warn_once(text, name, block=name)


_ADVICE = (
    "Pass use_cache=False or set model.config.use_cache = False. To train through the cache, pass apply any policy but "
    "'recompute'."
)
_IN_TRAINING = WarningText(
    "apply: {block} is given a key-value cache. It is removed, as by Transformers' own gradient checkpointing: "
    "training does not read it, and it would hold the keys and values of every block until backward.",
    _ADVICE,
    per="type of block",
)
_IN_EVALUATION = WarningText(
    "apply: {block} is given a key-value cache in evaluation. It runs without being checkpointed, as with "
    "Transformers' own gradient checkpointing.",
    _ADVICE,
    per="type of block",
)


def _words_of_second_call(block: torch.nn.Module, cache: Any) -> str:
    return (
        f"apply: {type(block).__name__} is given a {type(cache).__name__} for the second time, and it is empty: it was "
        f"removed from the arguments of the blocks in the first call.\n{_ADVICE}"
    )
