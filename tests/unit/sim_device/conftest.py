"""Every test starts with a machine at rest, and none may leave a fault behind that it did not take."""

from collections.abc import Iterator

import pytest
from sim import device


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    with device.checked():
        yield
