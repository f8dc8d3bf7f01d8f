"""`apply` and `remove`: checkpoint the blocks of a model without changing its code.

The forward of each block is replaced by an attribute of the instance, so the block keeps its type,
its `state_dict` keys and its hooks; hooks of the block itself run outside of the region, once.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypedDict, overload

import torch
from typing_extensions import Unpack

from actckpt._blocks.finding import has_forward, repeated_blocks
from actckpt._blocks.key_value_caches import without_cache
from actckpt._blocks.model_report import AppliedBlocks, ModelReport
from actckpt._offload.session import Destination
from actckpt._options import ApplyKeywords, CheckpointOptions
from actckpt._text.selectors import is_pattern, matches
from actckpt.action import Action
from actckpt.api import checkpoint_call, offload
from actckpt.errors import BlocksError
from actckpt.policies import Policy, choice_of

__all__ = ["apply", "remove", "report"]

Blocks = type[torch.nn.Module] | str | Callable[[torch.nn.Module], bool] | Sequence[type[torch.nn.Module] | str]


class OffloadKeywords(TypedDict, total=False):
    """What `apply` passes on to `offload`."""

    to: Destination
    min_bytes: int | str


@overload
def apply(
    model: torch.nn.Module,
    policy: Literal["offload", Action.OFFLOAD],
    blocks: Blocks | None = None,
    **options: Unpack[OffloadKeywords],
) -> tuple[str, ...]: ...


@overload
def apply(
    model: torch.nn.Module,
    policy: Policy | None = "recompute",
    blocks: Blocks | None = None,
    **options: Unpack[ApplyKeywords],
) -> tuple[str, ...]: ...


def apply(
    model: torch.nn.Module, policy: Policy | None = "recompute", blocks: Blocks | None = None, **options: Any
) -> tuple[str, ...]:
    """Checkpoint the blocks of `model`: each call of such a block becomes a region.

    Args:
        model: changed in place.
        policy: `"recompute"` or None: as in `checkpoint`. `"offload"`: each call runs under `offload`. Any other policy
            of `region`: each call is such a region.
        blocks: which of its modules: a type or several, qualified names (`"layers.0"`), also with wildcards, which
            stop at dots (`"layers.*"`: each layer, `"**.mlp"`: every mlp), or a predicate on modules. Of matches inside
            each other the outermost are taken; a name without wildcards is always taken. None: the repeated blocks.
            These are modules of a kind that repeats, in rows (ModuleList, Sequential, ModuleDict, numbered attributes),
            neither stages of many blocks nor small parts of blocks, such that the least is held at the peak; NOTE [
            Blocks of a model ] in actckpt/_blocks/finding.py says how.
        **options: keywords of `checkpoint`, or of `offload`, for every block.
    Returns:
        The qualified names of the blocks that are checkpointed now. Blocks that did not run in the first step that
        calls backward are named in one warning, and in `actckpt.report(model)`.
    Raises:
        BlocksError: no block matches, a name matches nothing, or a block is checkpointed already.
        TypeError: `model` is no module.
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
    _check_model(model, "apply")
    if policy is Action.OFFLOAD:
        policy = "offload"
    if policy is not None:
        choice_of(policy)  # raises if it is none
    _check_options(policy, options)
    chosen = _find(model, blocks)
    if not chosen:
        raise BlocksError(_nothing_found(model, blocks))
    applied = [name for name, block in chosen.items() if _is_applied(block)]
    if applied:
        raise BlocksError(
            f"apply: {len(applied)} of {len(chosen)} blocks are checkpointed already, the first is {applied[0]!r}.\n"
            "Call actckpt.remove(model) first, or pass other blocks."
        )
    together = AppliedBlocks()
    for name, block in chosen.items():
        block.forward = together.forwards[name] = _CheckpointedForward(block, policy, options, together)
    return tuple(chosen)


def _check_options(policy: Policy | None, options: dict[str, Any]) -> None:
    known = set(OffloadKeywords.__annotations__ if policy == "offload" else CheckpointOptions._fields) - {"policy"}
    unknown = sorted(set(options) - known)
    if unknown:
        hint = " With policy='offload' it is one." if set(unknown) <= set(OffloadKeywords.__annotations__) else ""
        raise ValueError(
            f"apply: unknown option {', '.join(unknown)} for policy={policy!r}.{hint} "
            f"Known: {', '.join(sorted(known))}."
        )
    if policy == "offload":
        offload(**options)  # raises if it cannot be called so


def remove(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo `apply` for every block of `model`.

    Returns:
        The qualified names of the blocks that were checkpointed.
    Raises:
        BlocksError: there are none.
    """
    applied = _applied(model, "remove")
    for module in applied.values():
        forward = module.__dict__.pop("forward")
        if forward.replaced is not None:
            module.forward = forward.replaced
    return tuple(applied)


class _CheckpointedForward:
    """The forward of one block, checkpointed. An object, so that deepcopy and pickle follow the block."""

    def __init__(
        self, block: torch.nn.Module, policy: Policy | None, options: dict[str, Any], together: AppliedBlocks
    ) -> None:
        self.block = block
        self.together = together
        self.has_run = False
        offloads = policy == "offload"
        #: The keywords of `offload`, None: the block is checkpointed.
        self.offloading = options if offloads else None
        self.options = CheckpointOptions() if offloads else CheckpointOptions(policy=policy, **options)
        #: A forward that the instance had of its own, for example from another library's patch.
        self.replaced: Callable[..., Any] | None = block.__dict__.get("forward")
        self.__wrapped__ = block.forward  # the signature, for `inspect`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_run = True
        if not torch.compiler.is_compiling() and not self.together.is_checked:
            return self.together.watched(self._run(*args, **kwargs))
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.offloading is not None:
            # Looked up inside: torch.compile breaks the graph here, and would make `self.block.forward` of a bound
            # method that it must carry over, which is this very object.
            with offload(**self.offloading):
                return self._original()(*args, **kwargs)
        original = self._original()
        reruns = self.options.policy in (None, "recompute", Action.RECOMPUTE)
        if reruns and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            arguments = without_cache(self.block, original, args, kwargs)
            if arguments is None:
                return original(*args, **kwargs)
            args, kwargs = arguments
        matches = None if torch.compiler.is_compiling() else self.together.matches
        return checkpoint_call(original, args, kwargs, self.options, matches=matches)

    def _original(self) -> Callable[..., Any]:
        if self.replaced is not None:
            return self.replaced
        if torch.compiler.is_compiling():  # before torch 2.13 it knows no way to make a bound method
            return functools.partial(type(self.block).forward, self.block)
        return types.MethodType(type(self.block).forward, self.block)


def report(model: torch.nn.Module) -> ModelReport:
    """Return what became of `apply` so far: which blocks it checkpoints, and which of them ran.

    Raises:
        BlocksError: no block of `model` is checkpointed.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block())
        >>> _ = actckpt.apply(model)
        >>> model(torch.randn(2, 4)).sum().backward()
        >>> actckpt.report(model).blocks_ran
        ('0', '1')
    """
    applied = _applied(model, "report")
    ran = tuple(name for name, module in applied.items() if module.forward.has_run)
    together = {id(module.forward.together): module.forward.together for module in applied.values()}
    idle = dict.fromkeys(operator for blocks in together.values() for operator in blocks.matches.idle())
    return ModelReport(blocks_patched=tuple(applied), blocks_ran=ran, operators_not_run=tuple(idle))


def _check_model(model: Any, what: str) -> None:
    if isinstance(model, torch.nn.Module):
        return
    kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    owner = getattr(model, "__self__", None)
    instead = "the model itself, a torch.nn.Module"
    if isinstance(owner, torch.nn.Module):
        instead = f"the {type(owner).__name__} that it belongs to"
    raise TypeError(f"{what}: model is {kind}, not a module. Pass {instead}: actckpt.{what}(model).")


def _applied(model: torch.nn.Module, what: str) -> dict[str, Any]:
    """Return the blocks of a model that are checkpointed; raises if there are none."""
    _check_model(model, what)
    applied = applied_blocks(model)
    if not applied:
        raise BlocksError(
            f"{what}: none of the {sum(1 for _ in model.modules())} modules of {type(model).__name__} is "
            f"checkpointed. Call {what} on the model that was given to apply."
        )
    return applied


def applied_blocks(model: torch.nn.Module) -> dict[str, Any]:
    """Return the blocks of a model that are checkpointed, by name.

    Their `forward`, assigned again after `remove`, is in use again.
    """
    return {name: module for name, module in model.named_modules() if _is_applied(module)}


def _is_applied(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), _CheckpointedForward)


def _find(model: torch.nn.Module, blocks: Blocks | None) -> dict[str, torch.nn.Module]:
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
    """Yield the names of the modules that a module is in, but for the whole model."""
    while name := name.rpartition(".")[0]:
        yield name


def _find_one(model: torch.nn.Module, block: Any) -> dict[str, torch.nn.Module]:
    named = {name: module for name, module in model.named_modules() if name}
    modules: dict[str, torch.nn.Module] = {name: module for name, module in named.items() if has_forward(module)}
    if isinstance(block, str):
        found = {name: module for name, module in modules.items() if matches(block, name)}
        if block in named and block not in modules:
            raise BlocksError(
                f"apply: {block!r} is a {type(named[block]).__name__}, which is never called: it has no "
                f"forward. Pass {block + '.*'!r} for the modules in it."
            )
        if not found:
            near = difflib.get_close_matches(block, modules, n=3)
            some = f"Nearest: {', '.join(near)}" if near else f"The first: {', '.join(list(modules)[:5]) or 'none'}"
            raise BlocksError(
                f"apply: no module of {type(model).__name__} is named {block!r}; it has {len(modules)}. {some}. "
                "Names are those of model.named_modules()."
            )
        return found
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


def _nothing_found(model: torch.nn.Module, blocks: Blocks | None) -> str:
    types = sorted({type(module).__name__ for module in model.modules()})
    what = "no repeated blocks" if blocks is None else f"no block that matches {blocks!r}"
    return (
        f"apply: found {what} among the {sum(1 for _ in model.modules())} modules of {type(model).__name__}, whose "
        f"types are {', '.join(types)}.\nPass blocks=: a module type, qualified names, or a predicate."
    )
