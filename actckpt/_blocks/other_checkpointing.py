"""Checkpointing that Transformers, Diffusers and timm enable by a flag of their modules: `apply` replaces it.

A flag on a block, or on a module inside, would checkpoint inside our region; a flag on a module around, around it. In
both cases a policy would have no effect. So these flags are turned off, and `remove` turns them on again. No library is
imported. A flag that is set after `apply` is noticed when a block runs next.
"""

import functools
from collections.abc import Collection, Iterable, Mapping
from weakref import ref

import torch
import torch.utils.checkpoint as torch_checkpoint

from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText

__all__ = ["holders", "is_on", "restore", "take_over"]

#: Of Transformers and Diffusers; of timm.
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
#: Replaces a flag that was on. It is false, follows its module into copies, and no library sets it.
_TAKEN_OVER = None
_IS_ON = WarningText(
    "apply: the own gradient checkpointing of {model} is on, with {options}. actckpt replaces it and leaves that out.",
    "Pass apply a policy or blocks instead, or call actckpt.remove(model) to use the library's.",
)
#: Options of their checkpoints that have no effect here.
_WITHOUT_EFFECT = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop")

Module = torch.nn.Module


def holders(model: Module, blocks: Collection[str]) -> "list[ref[Module]]":
    """Return the modules around blocks, by qualified name, that have a flag, on or off."""
    return [
        ref(module)
        for name, module in model.named_modules()
        if name not in blocks
        and any(hasattr(module, flag) for flag in _FLAGS)
        and any(_is_around(name, block) for block in blocks)
    ]


def is_on(block: Module, around: "Iterable[ref[Module]]") -> bool:
    """Whether a flag of a block or of a module around it is on. Called at every call of a block."""
    return _has_flag(block) or any((module := reference()) is not None and _has_flag(module) for reference in around)


def _has_flag(module: Module) -> bool:
    values = vars(module)
    return bool(values.get(_FLAGS[0]) or values.get(_FLAGS[1]))


def take_over(model: Module, blocks: Mapping[str, Module]) -> None:
    """Turn off a model's flags that concern blocks, by qualified name; warn of options that are lost."""
    flagged = [
        module
        for name, module in model.named_modules()
        if _has_flag(module) and any(_is_around(name, block) or _is_around(block, name) for block in blocks)
    ]
    if not flagged:
        return
    asked = {option for module in flagged for option in _options(module)}
    if any(getattr(block, flag, None) is False for block in blocks.values() for flag in _FLAGS):
        asked.add("only some of the layers")
    for module in flagged:
        for flag in _FLAGS:
            if getattr(module, flag, False):
                setattr(module, flag, _TAKEN_OVER)
    if asked:
        warn_user(_IS_ON, model=type(model).__name__, options=", ".join(sorted(asked)))


def restore(model: Module) -> None:
    """Turn the flags on again that were turned off."""
    for module in model.modules():
        for flag in _FLAGS:
            if vars(module).get(flag, False) is _TAKEN_OVER:
                setattr(module, flag, True)


def _is_around(name: str, inner: str) -> bool:
    """Whether a module is the other one or contains it, by their qualified names."""
    return not name or inner == name or inner.startswith(f"{name}.")


def _options(module: Module) -> Iterable[str]:
    """Return the non-default arguments of a flagged module's checkpoint function."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    if not isinstance(function, functools.partial):
        return []
    own = [] if function.func is torch_checkpoint.checkpoint else ["a function of its own (offload=True is one)"]
    return [*own, *(name for name, value in function.keywords.items() if value and name not in _WITHOUT_EFFECT)]
