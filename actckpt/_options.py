"""The options of `checkpoint`: defined once, passed as one object, and checked."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypedDict

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from actckpt._core import messages, random_state
from actckpt._text.operator_names import portable
from actckpt._text.suggestions import did_you_mean
from actckpt.policies import Policy

__all__ = [
    "NEWER_KEYWORDS",
    "TORCH_PARAMETERS",
    "ApplyKeywords",
    "CheckpointKeywords",
    "CheckpointOptions",
    "ContextFn",
    "SequentialKeywords",
    "check_call",
    "check_no_call",
    "meant_for_us",
]

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

#: Parameters of the installed torch's checkpoint.
TORCH_PARAMETERS = inspect.signature(torch_checkpoint.checkpoint).parameters


class CheckpointOptions(NamedTuple):
    """The options of `checkpoint`, documented in its docstring.

    A named tuple, not a dataclass: one is created at every call, in a fifth of the time.
    """

    use_reentrant: bool | None = False
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    preserve_rng_state: bool = True
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None
    policy: Policy | None = None
    offload_inputs: bool = False
    rng_trackers: Sequence[random_state.GetTracker] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return CheckpointOptions, tuple(map(portable, self))

    @property
    def is_rerun(self) -> bool:
        """Whether backward runs the function again, rather than single operators."""
        return self.policy is None or self.policy == "recompute"

    def check(self, kwargs: dict[str, Any]) -> None:
        """Raise if an option has an invalid value, or if two contradict each other.

        Args:
            kwargs: keywords of the function; options that only a newer torch has are removed from it.
        Raises:
            ValueError: says which option, and what to pass.
        """
        if self.use_reentrant:
            raise ValueError(
                "checkpoint: use_reentrant=True is not supported; actckpt has the non-reentrant variant only, which "
                "does all that the reentrant one does. Drop the keyword or pass use_reentrant=False, or keep "
                "torch.utils.checkpoint.checkpoint for this call."
            )
        if self.policy is not None and self.context_fn is not noop_context_fn:
            raise ValueError(
                "checkpoint: policy= and context_fn= both say what to recompute. Pass one of the two; a policy "
                "function of torch's create_selective_checkpoint_contexts can be passed as policy= unchanged."
            )
        if self.determinism_check not in ("default", "none"):
            raise ValueError(
                "checkpoint: determinism_check should be one of ['default', 'none'], but got "
                f"{self.determinism_check!r}."
            )
        for name in NEWER_KEYWORDS.keys() & kwargs.keys():
            if kwargs.pop(name) != NEWER_KEYWORDS[name]:
                raise ValueError(
                    f"checkpoint: the keyword {name!r} of torch {torch.__version__} is newer than this version of "
                    f"actckpt, which honours its default {NEWER_KEYWORDS[name]!r} only. Leave it out."
                )

    def make_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the forward and of the reruns."""
        contexts = self.context_fn()
        if not isinstance(contexts, (tuple, list)) or len(contexts) != 2:
            raise TypeError(
                f"checkpoint: context_fn returned {contexts!r}. It returns two context managers, one for the forward "
                "and one for the reruns; contextlib.nullcontext() is one that does nothing."
            )
        return contexts


#: Newer keywords of the installed torch's checkpoint, unknown to this file, with their defaults.
NEWER_KEYWORDS = {
    name: parameter.default
    for name, parameter in TORCH_PARAMETERS.items()
    if parameter.default is not parameter.empty and name not in ("function", *CheckpointOptions._fields)
}


class _Keywords(TypedDict, total=False):
    """The types of the options, for type checkers."""

    context_fn: ContextFn
    determinism_check: str
    debug: bool
    preserve_rng_state: bool
    early_stop: bool
    respect_saved_tensors_hooks: bool | None
    offload_inputs: bool
    rng_trackers: Sequence[random_state.GetTracker]


class ApplyKeywords(_Keywords, total=False):
    """Options that `apply` passes to each block."""

    use_reentrant: bool | None


class SequentialKeywords(_Keywords, total=False):
    """Options that `checkpoint_sequential` passes to each segment."""

    policy: Policy | None


class CheckpointKeywords(ApplyKeywords, SequentialKeywords, total=False):
    """All options."""


def check_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the function cannot be called, or cannot take a keyword that was meant for `checkpoint`."""
    if not callable(function):
        kind = f"a tensor of shape {tuple(function.shape)}" if isinstance(function, torch.Tensor) else repr(function)
        order = "The function comes first" if any(map(callable, args)) else "Pass it uncalled, its arguments after it"
        raise TypeError(
            f"checkpoint: {kind} is not a function. {order}: checkpoint(layer, x), not checkpoint(layer(x))."
        )
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TypeError(
            f"checkpoint: {function.__name__} is a class of modules, whose call makes one. Pass a module: "
            f"checkpoint(layer, x) with layer = {function.__name__}(...)."
        )
    for name in kwargs:
        hint = meant_for_us(name)
        if hint and not _takes_keyword(function, name):
            raise TypeError(
                f"checkpoint: neither checkpoint nor {messages.name_of(function)} has a keyword {name!r}. {hint}"
            )


@functools.lru_cache(maxsize=4096)
def meant_for_us(name: str) -> str:
    """Return a suggestion for a keyword that was meant for `checkpoint`; empty if it resembles none of our options."""
    if name == "min_bytes":
        return "To offload from a size on: with actckpt.offload(min_bytes=...): y = layer(x)."
    if budgets := difflib.get_close_matches(name, ("budget", "activation_budget"), n=1, cutoff=0.8):
        return f"A budget is one of a model, for all of its blocks: actckpt.apply(model, {budgets[0]}=...)."
    return did_you_mean([name], CheckpointOptions._fields, cutoff=0.8).lstrip()


def _takes_keyword(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(
            function.forward if isinstance(function, torch.nn.Module) else function
        ).parameters
    except ValueError:  # a builtin without a signature
        return True
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def check_no_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if `checkpoint` got arguments for a function, but no function."""
    if not args and not kwargs:
        return
    unexpected = [f"{len(args)} arguments"] * bool(args) + [f"keyword {name!r}" for name in kwargs]
    hint = "".join(f" {hint}" for hint in map(meant_for_us, kwargs) if hint)
    raise ValueError(
        f"checkpoint: no function was given, but {', '.join(unexpected)}. Arguments go to the decorated function: "
        f"checkpoint(use_reentrant=False)(fn)(*args).{hint}"
    )
