"""The counter of the oracle counts in forward and in backward, and changes nothing. Fixtures of several modules."""

from collections.abc import Iterator

import pytest
from oracle import CountOperators
from settings_seen import settings_as_before

import actckpt

__all__ = ["settings_as_before"]


@pytest.fixture(autouse=True, scope="session")
def _counters_only_observe() -> Iterator[None]:
    actckpt.configure(observers=[CountOperators])
    yield
    actckpt.configure(observers=())
