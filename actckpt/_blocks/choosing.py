"""The blocks that a user selected: by type, qualified name, pattern or predicate."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from actckpt._blocks.finding import has_forward, repeated_blocks
from actckpt._text.selectors import is_pattern, matches
from actckpt.errors import BlocksError

__all__ = ["Blocks", "check_made", "check_model", "check_not_meta", "chosen_blocks", "nothing_found"]

#: Module types, names or patterns (one or several), or a predicate.
Blocks = type[torch.nn.Module] | str | Callable[[torch.nn.Module], bool] | Sequence[type[torch.nn.Module] | str]


def check_model(model: Any, what: str) -> None:
    """Raise a TypeError that says what to pass to `what` if a model is no module."""
    if isinstance(model, torch.nn.Module):
        return
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    owner = getattr(model, "__self__", None)
    instead = "the model itself, a torch.nn.Module"
    if isinstance(owner, torch.nn.Module):
        instead = f"the {type(owner).__name__} that it belongs to"
    raise TypeError(f"{what}: model is {kind}, not a module. Pass {instead}: actckpt.{what}(model).")


def chosen_blocks(model: torch.nn.Module, blocks: Blocks | None) -> dict[str, torch.nn.Module]:
    """Return the selected modules of a model by their qualified names; default: see `finding`.

    Raises:
        BlocksError: a name is none of the model's, or an element is no selector.
    """
    if blocks is None:
        return repeated_blocks(model)
    several = blocks if isinstance(blocks, Sequence) and not isinstance(blocks, str) else [blocks]
    named: set[str] = set()
    matched: set[str] = set()
    for block in several:
        is_name = isinstance(block, str) and not is_pattern(block)
        (named if is_name else matched).update(_find_one(model, block))
    around = named | matched
    outermost = {name for name in matched if around.isdisjoint(_names_around(name))}
    return {name: module for name, module in model.named_modules() if name in named | outermost}


def _names_around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, without the whole model."""
    while name := name.rpartition(".")[0]:
        yield name


def _find_one(model: torch.nn.Module, block: Any) -> dict[str, torch.nn.Module]:
    named = {name: module for name, module in model.named_modules() if name}
    modules: dict[str, torch.nn.Module] = {name: module for name, module in named.items() if has_forward(module)}
    if isinstance(block, str):
        matching = {name: module for name, module in modules.items() if matches(block, name)}
        if block in named and block not in modules:
            raise BlocksError(
                f"apply: {block!r} is a {type(named[block]).__name__}, which is never called: it has no "
                f"forward. Pass {block + '.*'!r} for the modules in it."
            )
        if not matching:
            near = difflib.get_close_matches(block, modules, n=3)
            some = f"Nearest: {', '.join(near)}" if near else f"The first: {', '.join(list(modules)[:5]) or 'none'}"
            raise BlocksError(
                f"apply: no module of {type(model).__name__} is named {block!r}; it has {len(modules)}. {some}. "
                "Names are those of model.named_modules()."
            )
        return matching
    if isinstance(block, type):
        return {name: module for name, module in modules.items() if isinstance(module, block)}
    if isinstance(block, torch.nn.Module):
        name = next((name for name, module in named.items() if module is block), None)
        meant = "It is not in the model" if name is None else f"Pass its name, {name!r}"
        raise BlocksError(f"apply: blocks has a module, a {type(block).__name__}. {meant}; a type means all of a kind.")
    if callable(block):
        accepts: Callable[[torch.nn.Module], bool] = block
        return {name: module for name, module in modules.items() if accepts(module)}
    raise BlocksError(
        f"apply: blocks={block!r} is a {type(block).__name__}. Pass module types, qualified names (texts, also for "
        "numbers: '3'), or a predicate."
    )


def nothing_found(model: torch.nn.Module, blocks: Blocks | None) -> str:
    """Return the error text for a selection that matches no module."""
    types = sorted({type(module).__name__ for module in model.modules()})
    what = "no repeated blocks" if blocks is None else f"no block that matches {blocks!r}"
    return (
        f"apply: found {what} among the {sum(1 for _ in model.modules())} modules of {type(model).__name__}, whose "
        f"types are {', '.join(types)}. {_what_to_pass(model, blocks)}"
    )


def _what_to_pass(model: torch.nn.Module, blocks: Blocks | None) -> str:
    """Suggest a selection that matches modules, likely ones first; or what to do if there is none."""
    called = {name: module for name, module in model.named_modules() if name and has_forward(module)}
    if not called:
        return (
            "It has no modules inside that are called: give apply the model around it, or put actckpt.region(...) "
            "around parts of its forward."
        )
    kinds = Counter(type(module).__name__ for module in called.values() if next(module.parameters(), None) is not None)
    if blocks is not None or not kinds:
        return f"Pass blocks=: a module type, qualified names ({', '.join(list(called)[:3])}), or a predicate."
    kind, num = kinds.most_common(1)[0]
    names = [name for name, module in called.items() if type(module).__name__ == kind]
    return (
        "Blocks are found where modules of one kind that hold several layers, or parameters of their own, stand in a "
        f"row. Pass blocks=: the type of those whose activations are large ({kind}, of which there {_are(num)}), their "
        f"qualified names ({', '.join(map(repr, names[:3]))}), or a predicate."
    )


def _are(num: int) -> str:
    return "is one" if num == 1 else f"are {num}"


def check_made(blocks: Mapping[str, torch.nn.Module], what: str) -> None:
    """Raise a BlocksError if parameters or buffers of blocks are not materialized."""
    for name, block in blocks.items():
        for own, tensor in (*block.named_parameters(), *block.named_buffers()):
            if is_lazy(tensor):
                raise BlocksError(
                    f"{what}: {own!r} of block {name!r} is not made before its first forward (LazyLinear, say). "
                    f"Run the model once, then call {what}."
                )


def check_not_meta(model: torch.nn.Module, what: str) -> None:
    """Raise a ValueError if a model has meta parameters: its steps cannot be measured."""
    name = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if name is not None:
        raise ValueError(
            f"{what}: parameter {name!r} is on the meta device, so that nothing of a step can be measured. Give the "
            "model memory (model.to_empty(device=...), and its weights), or use actckpt.estimate, which needs none."
        )
