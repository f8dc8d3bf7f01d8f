"""The tests that need two processes; all of them run in the same two."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from pool import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes that are connected by gloo."""
    if sys.platform != "linux" or not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs Linux, and a torch that is built with gloo")
    found = Ranks()
    yield found
    found.close()
