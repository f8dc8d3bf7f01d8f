"""The counter of the oracle counts in forward and in backward, and changes nothing. Fixtures of several modules."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle import CountOperators
from settings_seen import settings_as_before

import actckpt

__all__ = ["settings_as_before"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files by their names, whatever their folder.

    Once torch.compile has run, Python calls functions in another way, and the references to their arguments that some
    tests count are more: these come first.
    """
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    ours = sorted((items[place] for place in places), key=lambda item: item.path.name)
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(autouse=True, scope="session")
def _counters_only_observe() -> Iterator[None]:
    actckpt.configure(observers=[CountOperators])
    yield
    actckpt.configure(observers=())
