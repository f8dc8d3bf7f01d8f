"""Random programs, plain and checkpointed: every output, gradient and random state is bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import assert_equal, ours, plain
from random_programs import outcome, regions


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(
    program=regions,
    with_grad=st.lists(st.booleans(), min_size=3, max_size=3).map(lambda flags: flags if any(flags) else [True] * 3),
    used=st.lists(st.booleans(), min_size=2, max_size=2),
    retain=st.booleans(),
    early_stop=st.booleans(),
    seed=st.integers(0, 3),
)
def test_random_programs_are_bit_equal_to_plain_autograd(
    program: list[Any], with_grad: list[bool], used: list[bool], retain: bool, early_stop: bool, seed: int
) -> None:
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return ours(function, *args, early_stop=early_stop, **kwargs)

    expected = outcome(plain, program, with_grad, used, retain, seed)
    assert_equal(outcome(checkpoint, program, with_grad, used, retain, seed), expected)
