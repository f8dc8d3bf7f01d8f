"""The counter of the oracle counts in forward and in backward, and changes nothing. Fixtures of several modules."""

from collections.abc import Iterator

import pytest
from oracle import CountOperators
from settings_seen import settings_as_before

import actckpt

__all__ = ["settings_as_before"]


#: What they compare depends on whether torch.compile has run in the process: then Python calls functions in another
#: way, the references to their arguments are more, and a flag of torch's dispatch modes may be left set.
_FIRST = {"test_better_than_torch.py", "test_interrupted.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run those files first."""
    items.sort(key=lambda item: item.path.name not in _FIRST)


@pytest.fixture(autouse=True, scope="session")
def _counters_only_observe() -> Iterator[None]:
    actckpt.configure(observers=[CountOperators])
    yield
    actckpt.configure(observers=())
