"""What TransformerEngine finds in the place of torch.cuda: one device, which is the CPU, and one stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from te_on_cpu import generators

#: The host's generator. The device's lies in torch's own, so that restoring the host's does not restore dropout.
_host = torch.Generator()


def host_get_rng_state() -> torch.Tensor:
    """Stand in for torch.get_rng_state."""
    return _host.get_state()


def host_set_rng_state(state: torch.Tensor) -> None:
    """Stand in for torch.set_rng_state."""
    _host.set_state(state)


def as_written(function: Any) -> Any:
    """Stand in for torch.jit.script."""
    return function


class _Generators:
    """The default generator of every device."""

    def __getitem__(self, index: Any) -> generators.DeviceGenerator:
        return generators.default


default_generators = _Generators()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the bytes of the device's state."""
    return generators.default.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the device's state."""
    generators.default.set_state(state)


def manual_seed(seed: int) -> None:
    """Seed the device's default generator."""
    generators.default.manual_seed(seed)


class Event:
    """All work is done when it is queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        """Do nothing."""

    wait = synchronize = record

    def query(self) -> bool:
        return True


class Stream(Event):
    """The one stream."""

    cuda_stream = 0
    device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    wait_event = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class CUDAGraph:
    """Has what TransformerEngine looks for, to know that generators may be handles."""

    def register_generator_state(self, generator: torch.Generator) -> None:
        raise NotImplementedError("graph capture is not emulated")


def current_stream(device: Any = None) -> Stream:
    """Return the one stream."""
    return _stream


_stream = Stream()
default_stream = current_stream


def stream(*args: Any) -> AbstractContextManager[None]:
    """Do nothing: `with stream(s)` and `with device(d)`."""
    return nullcontext()


device = stream


def current_device() -> torch.device:
    """Return the CPU; whoever asks uses it as a device, or as a key."""
    return torch.device("cpu")


def device_count() -> int:
    """One."""
    return 1


def is_available() -> bool:
    """Yes."""
    return True


is_initialized = is_bf16_supported = is_available


def is_current_stream_capturing() -> bool:
    """No."""
    return False


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return that of Hopper: FP8 products need transposed copies there, which modules keep and hand on."""
    return 9, 0


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return what is asked for."""
    return SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="emulated", total_memory=1 << 34)


def synchronize(device: Any = None) -> None:
    """Do nothing."""


def empty_cache() -> None:
    """Do nothing."""


def _lazy_init() -> None:
    """Do nothing."""


def _lazy_call(function: Callable[[], Any], **kwargs: Any) -> None:
    function()


nvtx = SimpleNamespace(range_push=lambda text: None, range_pop=lambda: None, range=lambda text: nullcontext())
