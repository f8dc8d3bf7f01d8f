"""The stores that tests of offloading run with."""

from collections.abc import Iterator

import pytest
from internals.stores import KINDS, assert_no_ticket_is_left, store_of_kind

import actckpt


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use a store of each kind, which must be empty in the end."""
    with store_of_kind(request.param):
        actckpt.reset_stats()
        yield request.param
        assert_no_ticket_is_left()
