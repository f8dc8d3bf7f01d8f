"""The stores that tests of offloading run with."""

import time
from collections.abc import Iterator

import pytest
from offload_oracle import KINDS, live_tickets, store_of_kind

import actckpt


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """Use a store of each kind, which must be empty in the end."""
    with store_of_kind(request.param):
        actckpt.reset_stats()
        yield request.param
        deadline = time.monotonic() + 5
        while device != "cpu" and live_tickets() and time.monotonic() < deadline:
            time.sleep(0.001)  # the device's thread of autograd lets go of its last graph a little later
        assert live_tickets() == 0, "every graph of the test is gone"
