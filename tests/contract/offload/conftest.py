"""The stores that tests of offloading run with."""

from collections.abc import Iterator

import pytest
from offload_oracle import KINDS, assert_no_ticket_is_left, store_of_kind

import actckpt


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Use the fixture with each kind of store. They are known only now: pytest may import this file too early."""
    has_own = any("kind" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "kind" in metafunc.fixturenames and not has_own:
        metafunc.parametrize("kind", KINDS, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use a store of each kind, which must be empty in the end."""
    with store_of_kind(request.param):
        actckpt.reset_stats()
        yield request.param
        assert_no_ticket_is_left()
