"""The state that a training step changes, saved and restored by functions that run a step to measure it."""

import copy
import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from actckpt import _C
from actckpt._core import devices, simulated
from actckpt._core.optimizers import trained_by
from actckpt._core.random_state import tracker_states
from actckpt._core.subclasses import plain_parts

__all__ = ["TrainingState", "random_state", "set_random_state"]


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _hash(tensor: Tensor) -> bytes:
    hash_ = hashlib.sha256()
    for part in plain_parts(tensor.detach()):
        hash_.update(_bits(part.cpu()).numpy().data)
    return hash_.digest()


class _Held:
    """One tensor: the object, and its bytes in host memory."""

    __slots__ = ("_bytes", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._bytes = None if tensor.is_meta or simulated.is_simulated() else tensor.detach().to("cpu", copy=True)

    def is_changed(self) -> bool:
        if self._bytes is None:
            return False
        pairs = zip(plain_parts(self.tensor.detach()), plain_parts(self._bytes), strict=True)
        return any(not torch.equal(_bits(now.cpu()), _bits(before)) for now, before in pairs)

    def put_back(self) -> Tensor:
        if self._bytes is not None:
            with torch.no_grad():
                self.tensor.copy_(self._bytes)
        return self.tensor


_NOT_GIVEN = (
    "{}: the step {}, so that a second step would not be the same. Pass what it runs, "
    "optimizer=..., several in a list; or leave the update out of the step."
)


class _HeldOptimizer:
    """One optimizer, its state and its group settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._states = {
            parameter: {
                name: _Held(value) if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in state.items()
            }
            for parameter, state in optimizer.state.items()
        }

    def put_back(self, *, keeps_new: bool) -> None:
        for group, settings in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(settings))
        if not keeps_new:
            self.optimizer.state.clear()
        for parameter, state in self._states.items():
            self.optimizer.state[parameter] = {
                name: value.put_back() if isinstance(value, _Held) else copy.deepcopy(value)
                for name, value in state.items()
            }


class TrainingState:
    """Current parameters, buffers, gradients, optimizer state and random state.

    Random state covers all default generators and those in module attributes.

    Args:
        model: all parameters, buffers and gradients of its modules.
        optimizers: the optimizers that the step runs: their state and group settings.

    Cost: copies of all of it in host memory.
    """

    def __init__(self, model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...] = ()) -> None:
        self._parameters = {name: _Held(tensor) for name, tensor in model.named_parameters()}
        self._buffers = [
            (module, name, None if buffer is None else _Held(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._gradients = [
            (held.tensor, None if held.tensor.grad is None else _Held(held.tensor.grad))
            for held in self._parameters.values()
        ]
        self._optimizers = [_HeldOptimizer(optimizer) for optimizer in optimizers]
        self._trained = trained_by(optimizers)
        self._random = random_state()
        self._generators = [(generator, generator.get_state()) for generator in _C.Parameters(model).generators]

    @contextmanager
    def checked(self, who: str) -> Iterator[None]:
        """Run a first step in the body; raise if a second one would not be the same.

        An optimizer of the model that was not passed raises before it changes anything. Without any optimizer,
        parameters must not change. Optimizers of other models (a discriminator) are ignored.
        """
        thread = threading.get_ident()

        def begins(optimizer: torch.optim.Optimizer, *_: object) -> None:
            others = {id(held.tensor) for held in self._parameters.values()} - self._trained
            if threading.get_ident() == thread and others & trained_by((optimizer,)):
                raise ValueError(
                    _NOT_GIVEN.format(who, f"runs an optimizer that was not given ({type(optimizer).__name__})")
                )

        handle = register_optimizer_step_pre_hook(begins)
        try:
            yield
        finally:
            handle.remove()
        if not self.has_optimizers and (changed := [n for n, held in self._parameters.items() if held.is_changed()]):
            raise ValueError(_NOT_GIVEN.format(who, f"changed {changed[0]!r}, and no optimizer was given"))

    @property
    def has_optimizers(self) -> bool:
        """Whether steps may change parameters."""
        return bool(self._optimizers)

    def has_changed_parameters(self) -> bool:
        """Whether the bytes of any parameter have changed."""
        return any(held.is_changed() for held in self._parameters.values())

    def digest(self) -> list[bytes]:
        """Return a digest of each parameter, buffer and gradient."""
        tensors: list[Tensor | None] = [held.tensor for held in self._parameters.values()]
        tensors += [module._buffers[name] for module, name, _ in self._buffers]
        tensors += [parameter.grad for parameter, _ in self._gradients]
        return [b"" if tensor is None or tensor.is_meta else _hash(tensor) for tensor in tensors]

    def put_back(self, *, keeps_new: bool = False) -> None:
        """Restore everything, in the same tensors.

        Args:
            keeps_new: keep optimizer state that was made since, as later training steps would find it.
        """
        for held in self._parameters.values():
            held.put_back()
        for module, name, buffer in self._buffers:
            module._buffers[name] = None if buffer is None else buffer.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.put_back()
        for optimizer in self._optimizers:
            optimizer.put_back(keeps_new=keeps_new)
        set_random_state(self._random)
        for generator, state in self._generators:
            generator.set_state(state)


def random_state() -> tuple[Any, ...]:
    """Return the states of all default generators (torch per device, Python, NumPy) and of known trackers."""
    accelerator = devices.available()
    generators = [] if accelerator is None else accelerator.generators()
    of_devices = [(generator, generator.get_state()) for generator in generators]
    return torch.get_rng_state(), of_devices, random.getstate(), numpy.random.get_state(), tracker_states()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Restore the states of all default generators and of trackers."""
    of_cpu, of_devices, of_python, of_numpy, of_trackers = state
    torch.set_rng_state(of_cpu)
    for generator, of_device in of_devices:
        generator.set_state(of_device)
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)
    for tracker in of_trackers:
        tracker.restore()
