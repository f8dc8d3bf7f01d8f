"""The simulated accelerator as actckpt knows accelerators: offloading goes through the engine's CUDA backend."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from actckpt import config
from actckpt._core import devices
from actckpt._offload import stores
from sim import device

__all__ = ["Simulated", "offloading"]


class Simulated(devices.Accelerator):
    """`torch.device("sim")`, whose library is the driver too."""

    driver_library = device.library_path

    def __init__(self) -> None:
        super().__init__("sim")

    @functools.cached_property
    def is_integrated(self) -> bool:
        return bool(torch.sim.get_device_properties().is_integrated)

    stream_handle = staticmethod(device.current_handle)  # a function in C++, as of CUDA's devices
    stream_at = staticmethod(device.stream_at)

    def host_seconds(self) -> float:
        return 0.0  # work of the host takes no simulated time, whatever it knows to have ended


@contextmanager
def offloading(**settings: object) -> Iterator[None]:
    """Let actckpt offload tensors of the simulated device, with a store of its own and these settings."""
    undo = devices.register(Simulated())
    before = dict(stores._stores)
    stores._stores.clear()
    kept = {name: getattr(config.settings(), name) for name in settings}
    config.configure(**settings)
    try:
        yield
    finally:
        config.configure(**kept)
        stores._stores.clear()
        stores._stores.update(before)
        undo()
