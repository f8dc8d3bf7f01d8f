"""An engine for CPU tensors over a disk that misbehaves on demand, for the tests of test_engine_cpu*.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import sim

from actckpt import _C

MIB = 1 << 20
Make = Callable[..., np.ndarray]
Wait = Callable[[Callable[[], bool]], None]


class Rig:
    """An engine over a store whose disk misbehaves on demand."""

    def __init__(self, folder: str, *, num_workers: int = 2, window_bytes: int | None = 64 * MIB) -> None:
        self.io = sim.FaultyFileIo()
        self.file = sim.spill_file(folder, self.io)
        self.engine = _C.CpuEngine(self.file, num_workers=num_workers, window_bytes=window_bytes)

    def faults(self, **values: int | bool) -> None:
        faults = sim.Faults()
        for name, value in values.items():
            setattr(faults, name, value)
        self.io.set(faults)

    def put(self, data: np.ndarray) -> _C.CpuTicket:
        ticket = self.engine.put(data.ctypes.data, data.nbytes, data)
        assert isinstance(ticket, _C.CpuTicket)
        return ticket


def load(ticket: _C.CpuTicket) -> np.ndarray:
    found = ticket.get()
    if found is None:
        out = np.zeros(ticket.nbytes, np.uint8)
        found = ticket.load(out.ctypes.data, out)
    assert isinstance(found, np.ndarray)
    return found
