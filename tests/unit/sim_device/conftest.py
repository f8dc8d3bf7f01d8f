"""Tests of the simulated device and of the store over it: `pytest --device sim tests/unit/sim_device`.

Not in a process with the others: torch has one accelerator per process, and from then on says that there is one. Every
test starts with a machine at rest, and none may leave a fault behind that it did not take.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave them out where the device is not asked for."""
    return None if config.getoption("--device") == "sim" else True


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    from sim import device

    with device.checked():
        yield
