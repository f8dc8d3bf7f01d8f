"""`wrap` and `unwrap`: a policy for the saved tensors of each TransformerEngine module of a model.

Forwards are replaced by instance attributes, as in `actckpt.apply`: modules keep their types, `state_dict` keys and
hooks.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch

from actckpt._checkpointed_call import checkpoint_call
from actckpt._interface import (
    DEFAULT_MIN_BYTES,
    GetTracker,
    disable_dynamo,
    everything_stays,
    is_capturing,
    offloading_hooks,
)
from actckpt._options import CheckpointOptions
from actckpt._text.selectors import matches
from actckpt._text.sizes import parse_bytes
from actckpt.api import offload
from actckpt.errors import BlocksError
from actckpt.te import registration
from actckpt.te.fresh_graphs import call_with_fresh_graphs
from actckpt.te.internals import is_te_module

__all__ = ["unwrap", "wrap"]

ModuleAction = Literal["keep", "recompute", "offload"]
_ACTIONS = get_args(ModuleAction)
ModulePolicy = ModuleAction | Mapping[str | type[torch.nn.Module], ModuleAction]


def wrap(
    module: torch.nn.Module,
    policy: ModulePolicy = "recompute",
    *,
    retain_graph: bool = False,
    get_rng_state_tracker: GetTracker | None = None,
    min_bytes: int | str = DEFAULT_MIN_BYTES,
) -> torch.nn.Module:
    """Recompute, offload or keep what TransformerEngine modules save for backward.

    Args:
        module: a TransformerEngine module, a container of such modules, or a model that has some. Changed in place.
        policy: `"recompute"`: run the module again in backward. `"offload"`: move its saved tensors off the GPU.
            `"keep"`:
            leave it unchanged. One for all outermost TransformerEngine modules, or a dict of several: its keys are
            qualified names of submodules or their ends (`"self_attention"`), also with wildcards (`"layers.*"`; `*`
            stops at dots, `**` crosses them), types, or names of types.
        retain_graph: let backward run any number of times, which TransformerEngine modules do not support: each wrapped
            module is run again in each backward. `"offload"` then offloads the inputs that this needs; `"keep"` raises.
        get_rng_state_tracker: as in `te.checkpoint`.
        min_bytes: for `"offload"`: smaller tensors stay.
    Returns:
        `module`.
    Raises:
        BlocksError: there is no TransformerEngine module, a key matches none, or a module is wrapped already.
        ValueError: an unknown policy, or `"keep"` with retain_graph.
    Cost: one more forward of recomputed modules; with retain_graph, of all modules, in each backward.
    """
    chosen = _chosen(module, policy, retain_graph=retain_graph)
    wrapped = [name for name, part in module.named_modules() if _is_wrapped(part)]
    if wrapped:
        raise BlocksError(f"te.wrap: {wrapped[0]!r} is wrapped already. Call actckpt.te.unwrap(module) first.")
    options = CheckpointOptions(rng_trackers=() if get_rng_state_tracker is None else (get_rng_state_tracker,))
    smallest = parse_bytes(min_bytes, what="te.wrap: min_bytes")
    for part, action in chosen.items():
        part.forward = _WrappedForward(part, action, options, smallest, retain_graph=retain_graph)
    return module


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Undo `wrap`.

    Raises:
        BlocksError: nothing in `module` is wrapped.
    """
    wrapped = [part for part in module.modules() if _is_wrapped(part)]
    if not wrapped:
        raise BlocksError(f"te.unwrap: nothing in {type(module).__name__} is wrapped. Pass what was given to te.wrap.")
    for part in wrapped:
        forward = part.__dict__.pop("forward")
        if forward.replaced is not None:
            part.forward = forward.replaced
    return module


class _WrappedForward:
    """The forward of one module under a policy. An object, so that deepcopy and pickle follow the module."""

    def __init__(
        self,
        module: torch.nn.Module,
        action: ModuleAction,
        options: CheckpointOptions,
        min_bytes: int,
        *,
        retain_graph: bool,
    ) -> None:
        self.module = module
        self.action = action
        self.options = options
        self.min_bytes = min_bytes
        self.retain_graph = retain_graph
        #: The instance's own forward before.
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")
        self.__wrapped__ = module.forward  # for `inspect`: the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, args, kwargs)

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward."""
        if self.replaced is not None:
            return self.replaced
        bound: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return bound

    def context(self) -> AbstractContextManager[Any]:
        """The context for a module that is not recomputed."""
        return offload(min_bytes=self.min_bytes) if self.action == "offload" else everything_stays()


@disable_dynamo
def _run(wrapped: _WrappedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled() or is_capturing():
        return wrapped.forward(*args, **kwargs)
    provider = registration.provider()
    if wrapped.retain_graph:
        hooks = offloading_hooks(wrapped.min_bytes) if wrapped.action == "offload" else None
        return call_with_fresh_graphs(
            wrapped.module,
            wrapped.forward,
            args,
            kwargs,
            provider=provider,
            rng_trackers=wrapped.options.rng_trackers,
            input_hooks=hooks,
        )
    if wrapped.action == "recompute":
        return checkpoint_call(wrapped.forward, args, kwargs, wrapped.options)
    with wrapped.context():
        return wrapped.forward(*args, **kwargs)


def _is_wrapped(module: torch.nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), _WrappedForward)


def _chosen(
    module: torch.nn.Module, policy: ModulePolicy, *, retain_graph: bool
) -> dict[torch.nn.Module, ModuleAction]:
    """Return the modules to wrap, each with its action.

    A policy for the whole applies to the outermost TransformerEngine modules; a policy by name or type, to the matches.
    A match inside another one that is recomputed would have no effect and raises. With retain_graph, every
    TransformerEngine node must be in a region that builds a new graph. So modules that no entry matches are wrapped
    too, outermost first.
    """
    _check_policy(policy, retain_graph=retain_graph)
    outermost = dict(_outermost(module, ""))
    if not outermost:
        types = sorted({type(part).__name__ for part in module.modules()})
        raise BlocksError(
            f"te.wrap: none of the {len(list(module.modules()))} modules of {type(module).__name__} is one of "
            f"TransformerEngine; their types are {', '.join(types)}. Use actckpt.apply for other modules."
        )
    if isinstance(policy, str):
        return dict.fromkeys(outermost.values(), policy)
    actions: dict[str, ModuleAction] = {}
    for key, action in policy.items():
        actions |= dict.fromkeys(_matching(module, key), action)
    _check_nesting(actions)
    chosen = {part: actions[name] for name, part in module.named_modules() if name in actions}
    if retain_graph:
        covered = tuple(name for name, action in actions.items() if action != "keep")
        chosen |= dict.fromkeys(_uncovered(module, "", covered), "recompute")
    return chosen


def _check_policy(policy: ModulePolicy, *, retain_graph: bool) -> None:
    actions = [policy] if isinstance(policy, str) else list(policy.values())
    for action in actions:
        if action not in _ACTIONS:
            raise ValueError(f"te.wrap: policy {action!r} is not known. Known: {', '.join(map(repr, _ACTIONS))}.")
        if action == "keep" and retain_graph:
            raise ValueError(
                "te.wrap: policy='keep' with retain_graph=True. What TransformerEngine's modules save can be used by "
                "one backward only; retain_graph=True runs them again. Pass 'recompute' or 'offload', or leave it out."
            )
    if not actions:
        raise ValueError(
            "te.wrap: the policy is empty. Pass 'recompute', or a dict like {'self_attention': 'offload'}."
        )


def _outermost(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    if is_te_module(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _outermost(child, f"{name}.{child_name}" if name else child_name)


def _uncovered(module: torch.nn.Module, name: str, covered: tuple[str, ...]) -> Iterator[torch.nn.Module]:
    """Yield the outermost TransformerEngine modules that are neither covered nor around covered ones."""
    if name in covered:
        return
    is_around = any(other.startswith(f"{name}." if name else "") for other in covered)
    if is_te_module(module) and not is_around:
        yield module
        return
    for child_name, child in module.named_children():
        yield from _uncovered(child, f"{name}.{child_name}" if name else child_name, covered)


def _matching(module: torch.nn.Module, key: str | type[torch.nn.Module]) -> list[str]:
    modules = dict(module.named_modules())
    if isinstance(key, str):
        names = [name for name, part in modules.items() if _matches(name, part, key)]
    else:
        names = [name for name, part in modules.items() if isinstance(part, key)]
    if names:
        return names
    known = sorted(
        {*modules, *(name.rpartition(".")[2] for name in modules), *(type(m).__name__ for m in modules.values())}
    )
    near = difflib.get_close_matches(key if isinstance(key, str) else key.__name__, known, n=3)
    raise BlocksError(
        f"te.wrap: no module of {type(module).__name__} is named, or of type, {key!r}; it has {len(modules)}. Nearest: "
        f"{', '.join(near) or 'none'}."
    )


def _matches(name: str, module: torch.nn.Module, key: str) -> bool:
    return key in (name, type(module).__name__) or (bool(name) and matches(f"**.{key}", name))


def _check_nesting(actions: Mapping[str, str]) -> None:
    for name in actions:
        around = [
            other
            for other, action in actions.items()
            if other != name and action == "recompute" and (not other or name.startswith(f"{other}."))
        ]
        if around:
            raise ValueError(
                f"te.wrap: {name!r} ({actions[name]}) is inside {around[0]!r}, which is recomputed as a whole: its own "
                "policy would change nothing. Name one of the two."
            )
