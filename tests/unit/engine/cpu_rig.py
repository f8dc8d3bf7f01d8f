"""An engine for CPU tensors over a disk that misbehaves on demand, for the tests of test_engine_cpu.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import sim

from actckpt import _C

PAGE, MIB = 4096, 1 << 20
Make = Callable[..., np.ndarray]
Wait = Callable[[Callable[[], bool]], None]


class Rig:
    """An engine over a store whose disk misbehaves on demand, with `num_buffers` bounce buffers each way."""

    def __init__(
        self,
        folder: str,
        *,
        num_workers: int = 2,
        num_buffers: int = 4,
        buffer_bytes: int = MIB,
        window_bytes: int | None = 64 * MIB,
        limit_bytes: int = 1 << 40,
    ) -> None:
        self.io = sim.FaultyFileIo()
        self.file = sim.spill_file(folder, self.io, limit_bytes=limit_bytes)
        self.engine = _C.DeviceEngine.host(
            spill_file=self.file,
            window_bytes=window_bytes,
            bounce_bytes=2 * num_buffers * buffer_bytes,
            buffer_bytes=buffer_bytes,
            num_workers=num_workers,
        )

    def faults(self, **values: int | bool) -> None:
        faults = sim.Faults()
        for name, value in values.items():
            setattr(faults, name, value)
        self.io.set(faults)

    def try_put(self, data: np.ndarray, *, must: bool = True) -> _C.DeviceTicket | _C.Kept:
        return self.engine.put(data.ctypes.data, data.nbytes, 0, 0, data, must=must)

    def put(self, data: np.ndarray) -> _C.DeviceTicket:
        ticket = self.try_put(data)
        assert isinstance(ticket, _C.DeviceTicket)
        return ticket


def begin_load(ticket: _C.DeviceTicket, *, urgent: bool = False) -> np.ndarray:
    """Begin to load into a new array; return it."""
    out = np.zeros(ticket.nbytes, np.uint8)
    assert ticket.load(0, 0, out.ctypes.data, out, urgent=urgent)
    return out


def load(ticket: _C.DeviceTicket) -> np.ndarray:
    """Return the bytes, as the hooks get them."""
    found = ticket.get(0, 0)
    if found is None:
        begin_load(ticket, urgent=True)
        found = ticket.get(0, 0)
    assert found is not None and isinstance(found[0], np.ndarray) and not found[1]
    return found[0]
