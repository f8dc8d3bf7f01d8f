"""The pool of the host gives free slabs back where room must be made."""

from types import SimpleNamespace
from typing import Any

import pytest
import sim

from actckpt._core import pressure
from actckpt._offload import backends, native


def test_the_pool_gives_free_slabs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    mock = sim.MockCuda()
    engine = mock.engine(limit_bytes=64 << 20, window_bytes=64 << 20, release=lambda keep, uses: None)
    monkeypatch.setitem(backends._backends, "host", (0, backends.CudaBackend(engine)))
    ticket: Any = engine.put(1 << 60, 1 << 20, 0, 0, SimpleNamespace())
    assert not isinstance(ticket, native.Kept)
    pinned = mock.num_pinned_bytes
    assert pressure.release(1 << 60)["host pool"] == 0
    ticket.drop()
    for _ in range(8):
        mock.drain()
        engine.poll()
    assert pressure.release(1 << 60)["host pool"] == pinned > 0
    assert mock.num_pinned_bytes == 0
    engine.shutdown()
