"""Keys of the cycles of a model: what tells their kinds apart."""

from __future__ import annotations

import enum
import weakref
from typing import Any

import torch

from actckpt._budget.running import device_of
from actckpt._core.storages import tensors_in
from actckpt._cycles.known_kinds import ForwardKey

__all__ = ["CycleKeys"]


class CycleKeys:
    """Makes the keys of the forwards of one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters: dict[str, list[weakref.ref[torch.nn.Parameter]]] = {}

    def has_gradients(self) -> bool:
        """Return whether gradients of parameters exist."""
        own = self._own("", self._model)
        return any(found is not None and found.grad is not None for ref in own for found in (ref(),))

    def forward(self, name: str, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardKey:
        """Return what a forward's share of a plan depends on.

        Args:
            name: of the module whose call it is: the model, or a part of it.
        """
        own = self._own(name, module)
        trained = bytes(found is None or found.requires_grad for ref in own for found in (ref(),))
        tensors = tuple(
            (tuple(size if type(size) is int else 1 for size in tensor.shape), (tensor.dtype, tensor.requires_grad))
            for tensor in tensors_in((args, kwargs))
        )
        # Numbers and texts may be others in each step, as data is.
        flags = ((name, str(v)) for name, v in (*enumerate(args), *kwargs.items()) if isinstance(v, (bool, enum.Enum)))
        keywords = frozenset(name for name, value in kwargs.items() if value is not None)
        device = device_of(self._model)
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return ForwardKey((name, device, module.training, autocast, keywords, frozenset(flags)), trained, tensors)

    def _own(self, name: str, module: torch.nn.Module) -> list[weakref.ref[torch.nn.Parameter]]:
        if name not in self._parameters:
            self._parameters[name] = [weakref.ref(parameter) for parameter in module.parameters()]
        return self._parameters[name]
