"""Keys of a model's cycles, by which their kinds are distinguished."""

from __future__ import annotations

import enum
import weakref
from typing import Any

import torch

from actckpt._budget.running import device_of
from actckpt._core.storages import gradient_of, tensors_in
from actckpt._cycles.known_kinds import ForwardKey

__all__ = ["CycleKeys"]


class CycleKeys:
    """Makes the keys of the forwards of one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parameters: list[weakref.ref[torch.nn.Parameter]] | None = None

    def has_gradients(self) -> bool:
        parameters = [parameter for ref in self._own() if (parameter := ref()) is not None]
        return any(gradient_of(parameter) is not None for parameter in parameters)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardKey:
        """Return what a forward's part of a plan depends on."""
        trained = bytes(parameter is None or parameter.requires_grad for ref in self._own() for parameter in (ref(),))
        tensors = tuple(
            (tuple(size if type(size) is int else 1 for size in tensor.shape), (tensor.dtype, tensor.requires_grad))
            for tensor in tensors_in((args, kwargs))
        )
        # Numbers and texts are left out: like data, they may change in each step.
        flags = ((name, str(v)) for name, v in (*enumerate(args), *kwargs.items()) if isinstance(v, (bool, enum.Enum)))
        keywords = frozenset(name for name, value in kwargs.items() if value is not None)
        device = device_of(self._model)
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return ForwardKey((device, self._model.training, autocast, trained, keywords, frozenset(flags)), tensors)

    def _own(self) -> list[weakref.ref[torch.nn.Parameter]]:
        if self._parameters is None:
            self._parameters = [weakref.ref(parameter) for parameter in self._model.parameters()]
        return self._parameters
