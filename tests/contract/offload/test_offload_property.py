"""Random programs under offload, mixed with checkpoint: every output, gradient and random state is bit-equal."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st
from internals.stores import KINDS, assert_no_ticket_is_left, flush, store_of_kind
from oracle import Checkpoint, assert_equal, in_offload, ours, plain, theirs
from random_programs import ByDepth, Drawn, draws, many_draws, outcome

import actckpt

#: What a region of the program becomes, by its depth.
_WAYS: dict[str, Checkpoint] = {
    "plain": plain,
    "offload": in_offload(),
    "checkpoint": ours,
    "checkpoint with inputs": partial(ours, offload_inputs=True),
    "checkpoint in offload": in_offload(ours),
    "offload in checkpoint": lambda function, *args, **kwargs: ours(in_offload(), function, *args, **kwargs),
    "torch": theirs,
}


@pytest.mark.parametrize("kind", KINDS)
@many_draws
@given(
    drawn=draws,
    ways=st.lists(st.sampled_from(sorted(_WAYS)), min_size=1, max_size=5),
    is_offloaded=st.booleans(),
    is_flushed=st.booleans(),
)
def test_random_programs_are_bit_equal_to_plain_autograd(
    kind: str, drawn: Drawn, ways: list[str], is_offloaded: bool, is_flushed: bool
) -> None:
    expected = outcome(plain, drawn)
    region = ByDepth([_WAYS[way] for way in ways])

    def flushed(*args: Any, **kwargs: Any) -> Any:
        result = region(*args, **kwargs)
        if is_flushed:
            flush()
        return result

    with store_of_kind(kind):
        with ExitStack() as stack:
            if is_offloaded:
                stack.enter_context(actckpt.offload(min_bytes=0))
            found = outcome(flushed, drawn)
        assert_equal(found, expected)
        assert_no_ticket_is_left()
