"""Random programs under offload, mixed with checkpoint: every output, gradient and random state is bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, strategies as st
from internals.stores import KINDS, assert_no_ticket_is_left, flush, store_of_kind
from oracle import assert_equal, ours, plain, theirs
from random_programs import Drawn, draws, many_draws, outcome

import actckpt

#: What a region of the program becomes, by its depth.
_WAYS = (
    "plain",
    "offload",
    "checkpoint",
    "checkpoint with inputs",
    "checkpoint in offload",
    "offload in checkpoint",
    "torch",
)


class _Depth:
    """How many regions are open; a rerun begins at the depth of its region."""

    def __init__(self) -> None:
        self.now = 0


def _call(way: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if way == "plain":
        return function(*args, **kwargs)
    if way == "offload":
        with actckpt.offload(min_bytes=0):
            return function(*args, **kwargs)
    if way == "checkpoint in offload":
        with actckpt.offload(min_bytes=0):
            return ours(function, *args, **kwargs)
    if way == "offload in checkpoint":
        return ours(actckpt.offload(min_bytes=0)(function), *args, **kwargs)
    if way == "torch":
        return theirs(function, *args, **kwargs)
    return ours(function, *args, offload_inputs=way == "checkpoint with inputs", **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@many_draws
@given(
    drawn=draws,
    ways=st.lists(st.sampled_from(_WAYS), min_size=1, max_size=5),
    is_offloaded=st.booleans(),
    is_flushed=st.booleans(),
)
def test_random_programs_are_bit_equal_to_plain_autograd(
    kind: str, drawn: Drawn, ways: list[str], is_offloaded: bool, is_flushed: bool
) -> None:
    expected = outcome(plain, drawn)
    depth = _Depth()

    def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = depth.now + 1

        def at_own_depth(*args: Any, **kwargs: Any) -> Any:
            outer, depth.now = depth.now, own
            try:
                return function(*args, **kwargs)
            finally:
                depth.now = outer

        result = _call(ways[own % len(ways)], at_own_depth, *args, **kwargs)
        if is_flushed:
            flush()
        return result

    with store_of_kind(kind):
        with ExitStack() as stack:
            if is_offloaded:
                stack.enter_context(actckpt.offload(min_bytes=0))
            found = outcome(region, drawn)
        assert_equal(found, expected)
        assert_no_ticket_is_left()
