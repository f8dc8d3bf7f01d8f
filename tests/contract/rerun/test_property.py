"""Random programs, plain and checkpointed: every output, gradient and random state is bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, strategies as st
from oracle import assert_equal, ours, plain
from random_programs import Drawn, draws, many_draws, outcome


@many_draws
@given(drawn=draws, early_stop=st.booleans())
def test_random_programs_are_bit_equal_to_plain_autograd(drawn: Drawn, early_stop: bool) -> None:
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return ours(function, *args, early_stop=early_stop, **kwargs)

    expected = outcome(plain, drawn)
    assert_equal(outcome(checkpoint, drawn), expected)
