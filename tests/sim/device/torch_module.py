"""`torch.sim`: what libraries look for in `torch.cuda`, for the simulated accelerator."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any

import torch

#: As torch.accelerator has them.
_MEMORY = (
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
)

Device = torch.device | str | int | None


def _index(device: Device = None) -> int:
    if isinstance(device, int) and device >= 0:
        return device
    found = None if device is None or isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if found is None else found


class _OnDevice:
    """A context in which another device is current."""

    def __init__(self, device: Device) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *raised: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _random(module: Any, generators: tuple[torch.Generator, ...]) -> None:
    def get_rng_state(device: Device = "sim") -> torch.Tensor:
        return generators[_index(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Device = "sim") -> None:
        generators[_index(device)].set_state(state)

    def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.default_generators = generators
    module.get_rng_state = get_rng_state
    module.set_rng_state = set_rng_state
    module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
    module.set_rng_state_all = set_rng_state_all
    module.manual_seed = lambda seed: generators[_index()].manual_seed(seed)
    module.manual_seed_all = manual_seed_all
    module.initial_seed = lambda: generators[_index()].initial_seed()


def _streams(module: Any, extension: Any) -> None:
    def is_current_stream_capturing() -> bool:
        stream = torch.accelerator.current_stream()
        return bool(extension.is_capturing(stream.device_index, stream.stream_id))

    module.Stream = torch.Stream
    module.Event = torch.Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    kind = torch.Stream(device="sim").device_type
    module.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)
    module.set_stream = torch.accelerator.set_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.is_current_stream_capturing = is_current_stream_capturing


def _devices(module: Any, extension: Any) -> None:
    module._initialized = True  # torch's checkpoint saves the random state of a device only then
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.init = lambda: None
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = extension.device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.device = _OnDevice
    module.get_device_name = lambda device=None: "simulated accelerator"
    module._is_integrated = False
    module.get_device_properties = lambda device=None: types.SimpleNamespace(
        name=module.get_device_name(device),
        total_memory=extension.capacity(_index(device)),
        is_integrated=module._is_integrated,
    )
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda: True


def made(extension: Any) -> types.ModuleType:
    """Return the module for the device's extension."""
    module: Any = types.ModuleType("torch.sim")
    module._extension = extension
    _devices(module, extension)
    _streams(module, extension)
    _random(module, tuple(extension.default_generator(i) for i in range(extension.device_count())))
    for name in _MEMORY:
        setattr(module, name, getattr(torch.accelerator, name))

    def mem_get_info(device: Device = None) -> tuple[int, int]:
        capacity = extension.capacity(_index(device))
        return max(0, capacity - torch.accelerator.memory_reserved(_index(device))), capacity

    module.mem_get_info = mem_get_info
    module.memory_snapshot = lambda: [
        {"device": i, **block} for i in range(extension.device_count()) for block in extension.snapshot(i)
    ]
    return module
