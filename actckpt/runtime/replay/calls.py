"""A region around one call of a function, with a policy: recorded, and what happens where compiled code is inside."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from actckpt.runtime.messages import name_of
from actckpt.runtime.replay.audit import Site
from actckpt.runtime.replay.choice import Choice
from actckpt.runtime.replay.opened import OpenRegion

__all__ = ["code_of", "run_in_region"]


def run_in_region(
    choice: Choice,
    site: Site,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    respects_hooks: bool,
) -> Any:
    """Run the forward recorded, so that single operators are replayed."""
    with OpenRegion(choice, site, respects_hooks=respects_hooks, runs_function=True) as opened:
        result = function(*args, **kwargs)
    if opened.compiled is not None:
        site.is_rerun = True
        _warn_of_compiled(function, *opened.compiled)
    return result


def _warn_of_compiled(function: Callable[..., Any], compiled_bytes: int, total_bytes: int) -> None:
    """Say once per function that its policy cannot be followed."""
    warnings.warn(
        f"{compiled_bytes / 2**20:.1f} of {total_bytes / 2**20:.1f} MiB that the policy for {name_of(function)} wants "
        "to recompute were made by compiled code, which is not recorded; they are kept this time. From its next call "
        "on the whole function runs again in backward instead, as with policy=None. To have the policy followed, "
        "compile around the checkpoint: actckpt.apply or checkpoint first, then torch.compile.",
        stacklevel=5,
    )


def code_of(function: Callable[..., Any]) -> Any:
    """Return what names a function across calls: a module, or the code of anything else with that of what it wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        return owner
    code = getattr(function, "__code__", type(function))
    wrapped = getattr(function, "__wrapped__", None)  # of compiled functions all codes are the same
    return code if wrapped is None else (code, getattr(wrapped, "__code__", type(wrapped)))
