"""What tests of the engine copy: addresses on the mock's device, where no memory is; and an engine over the mock."""

from __future__ import annotations

from typing import Any

import sim

from actckpt import _C

PAGE = 4096
DEFAULT = 0  # the handle of queue 0, the mock's default stream
OTHER = 2  # the handle of queue 1


class Tensor:
    """An address on the mock's device."""

    count = 0

    def __init__(self, pages: int = 1) -> None:
        Tensor.count += 100
        self.ptr, self.nbytes = (1 << 60) + Tensor.count * PAGE, pages * PAGE


class Rig:
    """An engine, and the sources that it gave back, with the streams that used them."""

    def __init__(self, *, limit_bytes: int = 1 << 26, window_bytes: int | None = 1 << 20, **options: Any) -> None:
        self.cuda = sim.MockCuda()
        self.released: list[tuple[object, list[tuple[int, int]]]] = []
        released = self.released  # `release` must not refer to the engine
        options["release"] = lambda keep, uses: released.append((keep, uses))
        self.engine = self.cuda.engine(limit_bytes=limit_bytes, window_bytes=window_bytes, **options)

    def put(self, tensor: Tensor, stream: int = DEFAULT, **options: bool) -> _C.DeviceTicket:
        ticket = self.engine.put(tensor.ptr, tensor.nbytes, 0, stream, tensor, **options)
        assert isinstance(ticket, _C.DeviceTicket)
        return ticket

    def settle(self) -> None:
        self.cuda.drain()
        self.engine.poll()
