"""The counter of the oracle counts in forward and in backward, and changes nothing. Fixtures of several modules."""

from collections.abc import Iterator

import pytest
from offload_oracle import store_of_kind
from oracle import CountOperators
from settings_seen import settings_as_before

import actckpt

__all__ = ["settings_as_before"]


#: It sees when inner regions release containers, by their references (csrc/rerun/exclusive.cpp). A call of
#: torch.compile(f, fullgraph=True) that raises, as some in compile/ must, leaves torch's frame evaluation in place for
#: good (torch 2.13; `torch._dynamo.reset()` does not take it away): then callers hold one more reference to arguments.
_FIRST = "test_better_than_torch.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run that file first."""
    items.sort(key=lambda item: item.path.name != _FIRST)


@pytest.fixture(autouse=True, scope="session")
def _counters_only_observe() -> Iterator[None]:
    actckpt.configure(observers=[CountOperators])
    yield
    actckpt.configure(observers=())


@pytest.fixture
def no_audit() -> None:
    """Let nothing that is wrong be put right by an audit, and no checksums count as operators or bytes."""
    actckpt.configure(audit="off")  # until the fixture of all tests puts it back


@pytest.fixture
def store_in_memory() -> Iterator[None]:
    """Let what is offloaded stay in memory."""
    with store_of_kind("memory"):
        yield
