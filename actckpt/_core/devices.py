"""Devices: the accelerator functions that the package uses, by device or device type.

torch has one kind of accelerator per process (`torch.accelerator`), with any number of devices.
`accelerator_of("cuda")` returns it; CPU and meta tensors have None. `Accelerator` uses `torch.accelerator` and the
device module (`torch.get_device_module`), with names that torch 2.9 has. A subclass adds what these lack, as `Cuda`
does (cuda.py).

Checkpoints, regions, random state and autocast need no more. The offload engine also needs a backend
(`driver_library`): a library with the functions of csrc/engine/cuda/driver.h, under the CUDA driver's names and with
its semantics, for the streams and addresses that torch uses. To support another accelerator, `register` a subclass that
names such a library. Before torch 2.11, which exposes native stream handles, it must also override `stream_handle` and
`stream_at`.

Nothing that a forward calls waits for a device. `synchronize` and memory statistics are for measuring, and for memory
that is about to be freed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actckpt._core import simulated, torch_private
from actckpt._core.accelerator import Accelerator, DeviceGenerator
from actckpt._core.cuda import CUDA_LIBRARY, Cuda

__all__ = [
    "CUDA_LIBRARY",
    "Accelerator",
    "Cuda",
    "DeviceGenerator",
    "Moment",
    "accelerator_of",
    "autocast_types",
    "available",
    "counting",
    "current",
    "current_index",
    "generator_of",
    "has_passed",
    "host_seconds",
    "is_capturing",
    "is_integrated",
    "is_on_accelerator",
    "moment",
    "register",
    "seconds_between",
    "synchronize",
    "usable",
    "used_generators",
]

#: By device type; created or registered ones.
_accelerators: dict[str, Accelerator] = {}


def accelerator_of(device_type: str) -> Accelerator | None:
    """Return the accelerator for a device type; None for the CPU and for types that torch counts as no accelerator."""
    accelerator = _accelerators.get(device_type)
    if accelerator is None and device_type not in ("cpu", "meta"):
        own = torch_private.current_accelerator()
        if own is not None and own.type == device_type:
            accelerator = _accelerators[device_type] = Cuda() if device_type == "cuda" else Accelerator(device_type)
    return accelerator


def register(accelerator: Accelerator) -> Callable[[], None]:
    """Use an accelerator for all devices of its type from now on; returns a function that undoes it."""
    device_type = accelerator.device_type
    before = _accelerators.get(device_type)
    _accelerators[device_type] = accelerator

    def undo() -> None:
        if before is None:
            _accelerators.pop(device_type, None)
        else:
            _accelerators[device_type] = before

    return undo


def counting(device: torch.device) -> Accelerator | None:
    """Return the accelerator of a device if its allocator has statistics; None: bytes must be counted otherwise."""
    accelerator = accelerator_of(device.type)
    return accelerator if accelerator is not None and accelerator.counts_memory else None


def is_integrated(device_type: str) -> bool:
    """Whether devices of a type use the host's memory; False for the CPU."""
    accelerator = accelerator_of(device_type)
    return accelerator is not None and accelerator.is_integrated


def current() -> Accelerator | None:
    """Return the accelerator that torch was built for or registered; this machine may have no such device."""
    own = torch_private.current_accelerator()
    return None if own is None else accelerator_of(own.type)


def available() -> Accelerator | None:
    """Return the accelerator if this machine has such a device; else None."""
    accelerator = current()
    return accelerator if accelerator is not None and accelerator.is_available() else None


def usable(name: str) -> torch.device:
    """Return a device of this machine by name; "auto" is the accelerator if there is one.

    Raises:
        ValueError: there is none of that name.
    """
    accelerator = available()
    if name == "auto":
        return torch.device("cpu" if accelerator is None else accelerator.device_type)
    names = ["cpu"]
    if accelerator is not None:
        names += [str(accelerator.device_at(index)) for index in range(accelerator.device_count())]
    if name not in (*names, names[-1].partition(":")[0]):
        raise ValueError(f"The device {name!r} cannot be used here; usable are auto, {', '.join(names)}.")
    return torch.device(name)


def current_index() -> int | None:
    """Return the index of the current device; None until a device has been used. Called for every region."""
    if torch_private.current_accelerator() is None:
        return None
    accelerator = current()
    return None if accelerator is None else accelerator.current_index()


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    accelerator = current()
    return accelerator is not None and accelerator.is_capturing()


def is_on_accelerator(tensor: Tensor) -> bool:
    """Whether a tensor has bytes, and not on the CPU."""
    return not (tensor.is_cpu or tensor.is_meta)


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device; does nothing for the CPU."""
    accelerator = accelerator_of(device.type)
    if accelerator is not None:
        accelerator.synchronize(device)


#: A point in a device's stream, or a host time in seconds.
Moment = torch.Event | float


def moment(device: torch.device) -> Moment:
    """Return this point in the device's current stream; if it has no timed events, wait and return the host time."""
    accelerator = accelerator_of(device.type)
    if accelerator is None or not accelerator.times_events:
        synchronize(device)
        return simulated.now()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))  # explicit: the default is the current device's
    return event


def host_seconds(device: torch.device) -> float:
    """Return the host time in seconds, comparable to the distances between moments of a device."""
    accelerator = accelerator_of(device.type)
    return simulated.now() if accelerator is None else accelerator.host_seconds()


def seconds_between(start: Moment, end: Moment) -> float:
    """Return the seconds from one moment of a device to a later one; waits for the later one."""
    if isinstance(start, torch.Event):
        assert isinstance(end, torch.Event)
        start.synchronize()  # may be on another stream
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert not isinstance(end, torch.Event)
    return end - start


def has_passed(moment: Moment) -> bool:
    """Whether a device has reached a moment; does not wait."""
    return not isinstance(moment, torch.Event) or moment.query()


def generator_of(device: torch.device) -> torch.Generator | DeviceGenerator | None:
    """Return a device's default generator, or a stand-in; None if it has no random numbers."""
    accelerator = accelerator_of(device.type)
    if accelerator is None:
        return None
    index = device.index if device.index is not None else accelerator.current_index()
    return None if index is None else accelerator.generator_at(index)


def used_generators() -> tuple[torch.Generator | DeviceGenerator, ...]:
    """Return the default generators, or stand-ins, of all accelerator devices in use."""
    accelerator = current()
    return () if accelerator is None else accelerator.used_generators()


def autocast_types() -> tuple[str, ...]:
    """Return the device types for which a program may have enabled autocast."""
    own = torch_private.current_accelerator()
    if own is None or not torch.amp.is_autocast_available(own.type):
        return ("cpu",)
    return "cpu", own.type
