"""Random programs under offload, mixed with reruns, replays and other hooks: all that they give is bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st
from internals.stores import KINDS, assert_no_ticket_is_left, flush, store_of_kind
from oracle import Checkpoint, assert_equal, in_offload, in_region, ours, plain, theirs
from random_programs import ByDepth, Drawn, draws, many_draws, outcome
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import actckpt


def _in(context: Callable[[], Any], method: Checkpoint = plain) -> Checkpoint:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return inside


def _aliases() -> Any:
    """Return hooks that hold aliases: a result that is held with its graph would hold itself, in torch too."""
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


#: What a region of the program becomes, by its depth.
_WAYS: dict[str, Checkpoint] = {
    "plain": plain,
    "offload": in_offload(),
    "checkpoint": ours,
    "checkpoint with inputs": partial(ours, offload_inputs=True),
    "checkpoint in offload": in_offload(ours),
    "offload in checkpoint": lambda function, *args, **kwargs: ours(in_offload(), function, *args, **kwargs),
    "torch": theirs,
    "region": in_region(),
    "region that keeps": in_region(["aten.mm", "aten.sin"]),
    "region that offloads": in_region(actckpt.policies.PerOp({"aten.mm": "offload"})),
    "region in save_on_cpu": _in(save_on_cpu, in_region()),
    "save_on_cpu": _in(save_on_cpu),
    "aliases": _in(_aliases),
}


@pytest.mark.filterwarnings("ignore:A region ran none of the operators:UserWarning")
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
