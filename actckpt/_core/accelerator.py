"""One kind of accelerator: its devices, the order of their work, their memory and their random numbers.

See NOTE [ Accelerators ] in `devices`. Nothing here knows which kind it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actckpt._core.nvml import GpuFacts

__all__ = ["Accelerator", "DeviceGenerator", "MemoryLabels"]


class MemoryLabels(NamedTuple):
    """What sets and gets the label of what an allocator gives out next."""

    set: Callable[[str], None]
    get: Callable[[], str]


class Accelerator:
    """One kind of accelerator. See NOTE [ Accelerators ].

    Args:
        device_type: as in `torch.device(device_type, 0)`.
    """

    #: The library that the engine opens to copy, by path or soname; None: the engine has no backend for it.
    driver_library: str | None = None

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._streams: dict[tuple[int | None, int], torch.Stream] = {}
        #: Devices that were not in use when a region asked last; None: none asked.
        self._unused: list[int] | None = None
        self._used_generators: tuple[torch.Generator | DeviceGenerator, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_one_of, (self.device_type,)  # there is one of each kind, also in copies of what holds it

    @property
    def module(self) -> Any:
        """The module of the device, as `torch.cuda` is; None if it has none."""
        return getattr(torch, self.device_type, None)

    def _has(self, name: str) -> bool:
        return hasattr(self.module, name)

    # Which devices there are.

    def is_available(self) -> bool:
        """Whether there is at least one device that can be used."""
        return self._has("is_available") and bool(self.module.is_available())

    def device_count(self) -> int:
        """Return how many devices there are."""
        return int(self.module.device_count())

    def device_at(self, index: int) -> torch.device:
        """Return a device by its number."""
        return torch.device(self.device_type, index)

    def name_of(self, device: torch.device) -> str:
        """Return what the device calls itself."""
        return str(self.module.get_device_name(device)) if self._has("get_device_name") else str(device)

    def facts_of(self, device: torch.device) -> GpuFacts | None:
        """Return what the vendor's management library tells of a device; None where there is none to ask."""
        return None

    def current_index(self) -> int | None:
        """Return the number of the current device; None as long as no device was used."""
        is_ready = getattr(self.module, "is_initialized" if self._has("is_initialized") else "is_available", None)
        return torch.accelerator.current_device_index() if is_ready is not None and is_ready() else None

    def at_index(self, index: int) -> AbstractContextManager[Any]:
        """Return a context in which that device is the current one."""
        return torch.accelerator.device_index(index)

    @functools.cached_property
    def times_events(self) -> bool:
        """Whether events tell the time between them."""
        try:
            events = [torch.Event(self.device_type, enable_timing=True) for _ in range(2)]
            for event in events:
                event.record()
            events[1].synchronize()
            events[0].elapsed_time(events[1])
        except (RuntimeError, NotImplementedError):
            return False
        return True

    def host_seconds(self) -> float:
        """Return the time of the host, in seconds, by a clock that runs as that of events does."""
        return time.perf_counter()

    def memory_labels(self) -> MemoryLabels | None:
        """Return what labels allocations in snapshots of the allocator; None where nothing does."""
        return None

    # In which order devices work.

    def stream_handle(self, device: torch.device) -> int:
        """Return the current stream of a device as the driver library knows it."""
        stream = torch.accelerator.current_stream(device)
        handle = int(stream.native_handle)  # type: ignore[attr-defined]  # from torch 2.11 on, not in its stubs
        self._streams.setdefault((device.index, handle), stream)
        return handle

    def stream_at(self, handle: int, device: torch.device) -> torch.Stream:
        """Return the stream for which `stream_handle` once returned that handle."""
        return self._streams[device.index, handle]

    def on_stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Return a context in which that stream is the current one of its device, which is the current one."""
        return stream

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Tell the allocator that work which is in a stream by now uses the memory of a tensor."""
        tensor.record_stream(stream)

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work of a device (Rule 4)."""
        torch.accelerator.synchronize(device)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return (
            self._has("is_current_stream_capturing")
            and self.current_index() is not None
            and bool(self.module.is_current_stream_capturing())
        )

    # How much memory there is, in bytes.

    @functools.cached_property
    def counts_memory(self) -> bool:
        """Whether the allocator of the devices counts what it has given out."""
        try:
            torch.accelerator.memory_allocated()
        except RuntimeError:  # an allocator of another kind than those that count
            return False
        return True

    def allocated_bytes(self, device: torch.device) -> int:
        """Return what tensors hold now. Needs `counts_memory`, as the next three."""
        return torch.accelerator.memory_allocated(device)

    def given_bytes(self, device: torch.device) -> int:
        """Return all that was given out since the process began, whether it is held or not."""
        return int(torch.accelerator.memory_stats(device)["allocated_bytes.all.allocated"])

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most that tensors held since `reset_peak`."""
        return torch.accelerator.max_memory_allocated(device)

    def reset_peak(self, device: torch.device, *, waits: bool = True) -> int:
        """Start the peak again from what tensors hold, which is returned; when all work is done where it waits."""
        if waits:
            self.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        return self.allocated_bytes(device)

    def memory_info(self, device: torch.device) -> tuple[int, int] | None:
        """Return what is free, for all processes, and what there is in all; None if nobody tells."""
        tell = getattr(torch.accelerator, "get_memory_info", None)  # from torch 2.10 on
        tell = tell or getattr(self.module, "mem_get_info", None)
        try:
            return None if tell is None else tell(device)
        except RuntimeError:  # as in `counts_memory`
            return None

    def unused_bytes(self, device: torch.device) -> int:
        """Return what the allocator of this process keeps, and no tensor holds."""
        if not self.counts_memory:
            return 0
        return torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)

    def empty_cache(self) -> None:
        """Give that back to the device."""
        torch.accelerator.empty_cache()

    # Random numbers.

    def generator_at(self, index: int) -> torch.Generator | DeviceGenerator | None:
        """Return the default generator of a device, or what stands for it; None if there are no random numbers."""
        generators = getattr(self.module, "default_generators", None)
        if generators is not None:
            return generators[index] if len(generators) else None  # none, as long as no device was used
        return DeviceGenerator(self, index) if self._tells_random_state() else None

    def generators(self) -> list[DeviceGenerator]:
        """Return what stands for the default generators of all devices, which it makes ready for use."""
        return [DeviceGenerator(self, i) for i in range(self.device_count())] if self._tells_random_state() else []

    def is_used(self, index: int) -> bool:
        """Whether this process may have used a device; asking does not make it ready for use."""
        return True

    def used_generators(self) -> tuple[torch.Generator | DeviceGenerator, ...]:
        """Return the default generators, or what stands for them, of all devices in use. Every region asks."""
        if self._unused is None:
            if self.current_index() is None:
                return ()
            self._unused = list(range(self.device_count())) if self._has("device_count") else []
        found = [index for index in self._unused if self.is_used(index)] if self._unused else ()
        if found:
            self._unused = [index for index in self._unused if index not in found]
            made = (*self._used_generators, *map(self.generator_at, found))
            self._used_generators = tuple(dict.fromkeys(generator for generator in made if generator is not None))
        return self._used_generators

    def _tells_random_state(self) -> bool:
        return self._has("get_rng_state") and self._has("set_rng_state")


class DeviceGenerator:
    """Stands for the default generator of a device: reads and writes its state through the module of the device."""

    def __init__(self, accelerator: Accelerator, index: int) -> None:
        self._accelerator, self._index = accelerator, index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceGenerator) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, int]:
        return self._accelerator.device_type, self._index

    def get_state(self) -> Tensor:
        """Return the state as bytes."""
        state: Tensor = self._accelerator.module.get_rng_state(self._index)
        return state

    def set_state(self, state: Tensor) -> None:
        """Make the state what `get_state` returned."""
        self._accelerator.module.set_rng_state(state, self._index)


def _the_one_of(device_type: str) -> Accelerator | None:
    from actckpt._core.devices import accelerator_of  # which imports this module

    return accelerator_of(device_type)
