"""A region around one call of a function, with a policy: recorded, and what happens where compiled code is inside."""

from collections.abc import Callable
from typing import Any, NamedTuple

from actckpt._core.messages import name_of
from actckpt._core.region_report import Figures
from actckpt._core.sites import warn_user
from actckpt._replay.active_region import OpenRegion
from actckpt._replay.audit import Site
from actckpt._replay.choice import Choice
from actckpt._replay.named_operators import Matches

__all__ = ["RegionOptions", "run_in_region"]


class RegionOptions(NamedTuple):
    """What is taken down of what runs in a region, and how its operators are named."""

    #: Gets the operators that run, of those that the policy names; None: the site of the region does, and warns.
    matches: Matches | None = None
    #: Get what becomes of values where operators are replayed.
    figures: Figures | None = None
    #: Places count the calls of modules in this region alone (NOTE [ Places ], Rule 4).
    counts_anew: bool = False
    #: Places do not rely on what regions with the same first operators ran before.
    looks_up_calls: bool = False
    #: It is a block, through which backward goes at once: all that it asks for again stays (NOTE [ Windows ]).
    is_block: bool = False
    #: Called in place of the warning that compiled code made what the policy wants to recompute.
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
    """Say once per function that its policy cannot be followed."""
    warn_user(
        f"{compiled_bytes / 2**20:.1f} of {total_bytes / 2**20:.1f} MiB that the policy for {name_of(function)} wants "
        "to recompute were made by compiled code, which is not recorded; they are kept this time. From its next call "
        "on the whole function runs again in backward instead, as with policy=None. To have the policy followed, "
        "compile around the checkpoint: actckpt.apply or checkpoint first, then torch.compile.",
    )
