"""`apply` and `remove`: checkpoint the blocks of a model without changing its code.

The forward of each block is replaced by an attribute of the instance, so the block keeps its type,
its `state_dict` keys and its hooks; hooks of the block itself run outside of the region, once.
"""

import difflib
import fnmatch
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from actckpt.api import checkpoint, checkpoint_call, offload
from actckpt.errors import BlocksError
from actckpt.policies import choice_of, compiled_form
from actckpt.runtime.key_value_caches import without_cache

__all__ = ["apply", "remove"]

Blocks = type[torch.nn.Module] | str | Callable[[torch.nn.Module], bool] | Sequence[type[torch.nn.Module] | str]


def apply(
    model: torch.nn.Module, policy: Any = "recompute", blocks: Blocks | None = None, **options: Any
) -> tuple[str, ...]:
    """Checkpoint the blocks of `model`: each call of such a block becomes a region.

    Args:
        model: changed in place.
        policy: `"recompute"` or None: as in `checkpoint`. `"offload"`: each call runs under `offload`. Any other policy
            of `region`: each call is such a region.
        blocks: which of its modules: a type or several, qualified names (`"layers.0"`, also with
            wildcards: `"layers.*"`), or a predicate on modules. None: the repeated blocks, which are
            the outermost modules of one type that stand together in a ModuleList, Sequential or ModuleDict.
        **options: keywords of `checkpoint`, or of `offload`, for every block.
    Returns:
        The qualified names of the blocks that are checkpointed now.
    Raises:
        BlocksError: no block matches, a name matches nothing, or a block is checkpointed already.
        ValueError: the policy, or an option, is not known, or `offload` does not take its value.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> actckpt.apply(model)
        ('0', '1', '2')
        >>> actckpt.remove(model)
        ('0', '1', '2')
    """
    if policy is not None:
        choice_of(policy)  # raises if it is none
    known = inspect.signature(offload if policy == "offload" else checkpoint).parameters
    unknown = sorted(name for name in options if name in ("function", "args", "kwargs") or name not in known)
    if unknown:
        raise ValueError(
            f"apply: unknown option {', '.join(unknown)} for policy={policy!r}. Known: "
            f"{', '.join(sorted(set(known) - {'function', 'args', 'kwargs', 'policy'}))}."
        )
    if policy == "offload":
        offload(**options)  # raises if it cannot be called so
    chosen = _find(model, blocks)
    if not chosen:
        raise BlocksError(_nothing_found(model, blocks))
    applied = [name for name, block in chosen.items() if _is_applied(block)]
    if applied:
        raise BlocksError(
            f"apply: {len(applied)} of {len(chosen)} blocks are checkpointed already, the first is {applied[0]!r}.\n"
            "Call actckpt.remove(model) first, or pass other blocks."
        )
    for block in chosen.values():
        block.forward = _CheckpointedForward(block, policy, options)
    return tuple(chosen)


def remove(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo `apply` for every block of `model`.

    Returns:
        The qualified names of the blocks that were checkpointed.
    Raises:
        BlocksError: there are none.
    """
    applied = {name: module for name, module in model.named_modules() if _is_applied(module)}
    if not applied:
        raise BlocksError(
            f"remove: none of the {sum(1 for _ in model.modules())} modules of {type(model).__name__} is "
            "checkpointed. Call remove on the model that was given to apply."
        )
    for module in applied.values():
        forward = module.__dict__.pop("forward")
        if forward.replaced is not None:
            module.forward = forward.replaced
    return tuple(applied)


class _CheckpointedForward:
    """The forward of one block, checkpointed. An object, so that deepcopy and pickle follow the block."""

    def __init__(self, block: torch.nn.Module, policy: Any, options: dict[str, Any]) -> None:
        self.block = block
        self.policy = policy
        #: What the compiler takes for it, None: nothing else.
        self.compiled_policy = None if policy in (None, "recompute") else compiled_form(policy)
        self.options = options
        #: A forward that the instance had of its own, for example from another library's patch.
        self.replaced: Callable[..., Any] | None = block.__dict__.get("forward")
        self.__wrapped__ = block.forward  # the signature, for `inspect`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.policy == "offload":
            # Looked up inside: torch.compile breaks the graph here, and would make `self.block.forward` of a bound
            # method that it must carry over, which is this very object.
            with offload(**self.options):
                return self._original()(*args, **kwargs)
        policy = self.policy
        if torch.compiler.is_compiling() and self.compiled_policy is not None:
            policy = self.compiled_policy
        original = self._original()
        if policy in (None, "recompute") and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            arguments = without_cache(self.block, original, args, kwargs)
            if arguments is None:
                return original(*args, **kwargs)
            args, kwargs = arguments
        return checkpoint_call(original, args, kwargs, policy=policy, **self.options)

    def _original(self) -> Callable[..., Any]:
        if self.replaced is not None:
            return self.replaced
        if torch.compiler.is_compiling():  # before torch 2.13 it knows no way to make a bound method
            return functools.partial(type(self.block).forward, self.block)
        return types.MethodType(type(self.block).forward, self.block)


def _is_applied(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), _CheckpointedForward)


def _find(model: torch.nn.Module, blocks: Blocks | None) -> dict[str, torch.nn.Module]:
    if blocks is None:
        return dict(_repeated(model, ""))
    if isinstance(blocks, Sequence) and not isinstance(blocks, str):
        found: dict[str, torch.nn.Module] = {}
        for block in blocks:
            found |= _find_one(model, block)
        return {name: module for name, module in model.named_modules() if name in found}
    return _find_one(model, blocks)


def _find_one(model: torch.nn.Module, block: Any) -> dict[str, torch.nn.Module]:
    modules: dict[str, torch.nn.Module] = {name: module for name, module in model.named_modules() if name}
    if isinstance(block, str):
        found = {name: module for name, module in modules.items() if fnmatch.fnmatchcase(name, block)}
        if not found:
            near = difflib.get_close_matches(block, modules, n=3)
            raise BlocksError(
                f"apply: no module of {type(model).__name__} is named {block!r}; it has {len(modules)}."
                f" Nearest: {', '.join(near) or 'none'}. Names are those of model.named_modules()."
            )
        return found
    if isinstance(block, type):
        return {name: module for name, module in modules.items() if isinstance(module, block)}
    if callable(block):
        matches: Callable[[torch.nn.Module], bool] = block
        return {name: module for name, module in modules.items() if matches(module)}
    raise BlocksError(
        f"apply: blocks={block!r} is a {type(block).__name__}. Pass module types, qualified names, or a predicate."
    )


def _repeated(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost groups of at least two blocks of one type that have modules of their own."""
    children = list(module.named_children())
    is_container = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict))
    kinds = [type(child) for _, child in children if next(child.children(), None) is not None]
    for name, child in children:
        if is_container and kinds.count(type(child)) >= 2:
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _nothing_found(model: torch.nn.Module, blocks: Blocks | None) -> str:
    types = sorted({type(module).__name__ for module in model.modules()})
    what = "no repeated blocks" if blocks is None else f"no block that matches {blocks!r}"
    return (
        f"apply: found {what} among the {sum(1 for _ in model.modules())} modules of {type(model).__name__}, whose "
        f"types are {', '.join(types)}.\nPass blocks=: a module type, qualified names, or a predicate."
    )
