"""A region around one function call, with a policy: it is recorded. Compiled code inside it is handled here."""

from collections.abc import Callable
from typing import Any, NamedTuple

from actckpt._core.messages import name_of
from actckpt._core.region_report import Figures
from actckpt._core.sites import warn_user
from actckpt._core.warning_texts import WarningText
from actckpt._replay.active_region import OpenRegion
from actckpt._replay.call_sites import Site
from actckpt._replay.choice import Choice
from actckpt._replay.named_operators import Matches

__all__ = ["RegionOptions", "run_in_region"]

_COMPILED = WarningText(
    "{compiled} of {total} MiB that the policy for {function} wants to recompute were made by compiled code, which is "
    "not recorded; they are kept in this call. From its next call on the whole function runs again in backward, as "
    "with policy=None.",
    "To have the policy followed, call actckpt.apply or checkpoint first, then torch.compile around it.",
    per="function",
)


class RegionOptions(NamedTuple):
    """What a region records, and how its operators are named."""

    #: Receives the operators that ran, of those that the policy names; None: the region's site does, and warns.
    matches: Matches | None = None
    #: Receives what happens to values, where operators are replayed.
    figures: Figures | None = None
    #: Places count module calls within this region only (NOTE [ Places ]).
    counts_anew: bool = False
    #: Places do not reuse module calls remembered from earlier regions with the same first operator.
    looks_up_calls: bool = False
    #: A block: backward passes through it in one go, so everything that it needs again stays cached (NOTE [ Windows ]).
    is_block: bool = False
    #: Called instead of warning that compiled code made what the policy wants to recompute.
    note_compiled: Callable[[], None] | None = None


def run_in_region(
    choice: Choice,
    site: Site,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    respects_hooks: bool,
    inside: RegionOptions,
) -> Any:
    """Run the forward recorded, so that single operators are replayed."""
    with OpenRegion(
        choice,
        site,
        inside.figures,
        respects_hooks=respects_hooks,
        arguments=args,
        matches=inside.matches,
        counts_anew=inside.counts_anew,
        looks_up_calls=inside.looks_up_calls,
        is_block=inside.is_block,
    ) as opened:
        result = function(*args, **kwargs)
    if opened.compiled is not None:
        site.is_rerun = True
        if inside.note_compiled is not None:
            inside.note_compiled()
        else:
            _warn_of_compiled(function, *opened.compiled)
    return result


def _warn_of_compiled(function: Callable[..., Any], compiled_bytes: int, total_bytes: int) -> None:
    """Warn once per function that its policy cannot be followed."""
    sizes = {"compiled": f"{compiled_bytes / 2**20:.1f}", "total": f"{total_bytes / 2**20:.1f}"}
    warn_user(_COMPILED, function=name_of(function), **sizes)
