"""What TransformerEngine finds in the place of torch.cuda: one device, which is the CPU, and one stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class Event:
    """All work is done when it is queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = synchronize = _returns(None)
    query = _returns(True)


class Stream(Event):
    """The one stream."""

    cuda_stream = 0
    device = torch.device("cpu")
    wait_stream = wait_event = _returns(None)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class CUDAGraph:
    """Has what TransformerEngine looks for, to know that generators may be handles."""

    def register_generator_state(self, generator: torch.Generator) -> None:
        raise NotImplementedError("graph capture is not emulated")


manual_seed = generators.default.manual_seed
current_stream = default_stream = _returns(Stream())
stream = device = _returns(nullcontext())  # with stream(s), with device(d)
current_device = _returns(torch.device("cpu"))
device_count = _returns(1)
is_available = is_initialized = is_bf16_supported = _returns(True)
is_current_stream_capturing = _returns(False)
#: That of Hopper: FP8 products need transposed copies there, which modules keep and hand on.
get_device_capability = _returns((9, 0))
get_device_properties = _returns(
    SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="emulated", total_memory=1 << 34)
)
synchronize = empty_cache = _lazy_init = _returns(None)


def _lazy_call(function: Callable[[], Any], **kwargs: Any) -> None:
    function()


nvtx = SimpleNamespace(range_push=_returns(None), range_pop=_returns(None), range=_returns(nullcontext()))
