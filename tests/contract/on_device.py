"""The suite on another device than the CPU: `pytest --device sim` makes every tensor of a test on the simulated one.

`--device cuda` makes them on a GPU (on_cuda.py).

Functions that make tensors are given `device=` where a test names none, as `torch.set_default_device` would, but in
every thread, and without a function mode, which would keep regions off the path that programs take.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import on_cuda
import torch
from torch.utils._device import DeviceContext, _device_constructors

__all__ = ["device_type", "memory_of", "random_states", "tensors_on"]

#: Where the tensors of tests are.
device_type = "cpu"


def random_states() -> list[torch.Tensor]:
    """Return the states of the default generators of the CPU and of the devices that tests run on."""
    states = [torch.get_rng_state()]
    if device_type != "cpu":
        states += getattr(torch, device_type).get_rng_state_all()
    return states


def memory_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor as an array of NumPy, for what a kernel does that torch knows nothing of."""
    if tensor.is_cuda:
        return on_cuda.memory_of(tensor)
    itemsize, storage = tensor.element_size(), tensor.untyped_storage()
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage  # type: ignore[attr-defined]  # the array holds it
    dtype = torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    strides = tuple(stride * itemsize for stride in tensor.stride())
    return numpy.ndarray(tuple(tensor.shape), dtype, memory, tensor.storage_offset() * itemsize, strides)


def _names_a_device(kwargs: dict[str, Any]) -> bool:
    if kwargs.get("device") is not None or kwargs.get("pin_memory"):  # only memory of the host can be pinned
        return True
    if torch._C._len_torch_function_stack() == 0:
        return False
    return any(isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def _on_device(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        if _names_a_device(kwargs):
            return make(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:  # only its own device can draw from it
            drawn = make(*args, **{**kwargs, "device": generator.device, "requires_grad": False}).to(device_type)
            return drawn.requires_grad_(kwargs.get("requires_grad", False))
        return make(*args, **{**kwargs, "device": device_type})

    return made


def _constructors() -> Iterator[tuple[Any, str]]:
    """Yield module and name of each function that makes tensors."""
    known = _device_constructors()
    for module in (torch, torch.fft, sys.modules["torch.signal.windows.windows"], torch.signal.windows):
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__hash__", None) and value in known:
                yield module, name


@contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Make tensors on `device` inside the block where their maker does not say."""
    global device_type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(
            "torch._decomp.decompositions_for_jvp"
        )  # scripted once, before what is put in place below
    before = [(module, name, getattr(module, name)) for module, name in _constructors()]
    device_before, device_type = device_type, device
    for module, name, make in before:
        setattr(module, name, _on_device(make))
    try:
        yield
    finally:
        device_type = device_before
        for module, name, make in before:
            setattr(module, name, make)
