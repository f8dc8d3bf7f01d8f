"""The pool of the host gives free slabs back where room must be made."""

from types import SimpleNamespace
from typing import Any

import pytest
import sim

from actckpt import _C
from actckpt._core import pressure
from actckpt._offload import stores
from actckpt._offload.device import DeviceStore


def test_the_pool_gives_free_slabs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    mock = sim.MockCuda()
    engine = mock.engine(limit_bytes=64 << 20, window_bytes=64 << 20, release=lambda keep, uses: None)
    monkeypatch.setitem(stores._stores, "cuda", (0, DeviceStore(engine, sim.OneStream("cuda"))))
    source = SimpleNamespace(
        start=0, nbytes=1 << 20, storage=SimpleNamespace(data_ptr=lambda: 1 << 60, device=SimpleNamespace(index=0))
    )
    ticket: Any = engine.put(1 << 60, source.nbytes, 0, 0, source)
    assert not isinstance(ticket, _C.Kept)
    pinned = mock.num_pinned_bytes
    assert pressure.release(1 << 60)["host pool"] == 0
    ticket.drop()
    for _ in range(8):
        mock.drain()
        engine.poll()
    assert pressure.release(1 << 60)["host pool"] == pinned > 0
    assert mock.num_pinned_bytes == 0
    engine.shutdown()
