"""The kinds of a model's cycles, and the kind as which a cycle runs.

The first kinds have their own plans. A later cycle whose shapes exceed those of a planned kind in no dimension runs
that kind's plan; of several such kinds, the one with the fewest elements. A cycle that exceeds each of them somewhere
gets its own plan, up to a limit. So does one that needs more than its shapes show: larger tensors inside, more
forwards, or another order of backwards. Beyond the limit everything is recomputed, with a warning.
"""

from __future__ import annotations

import enum
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from actckpt._budget.running import device_of
from actckpt._core.storages import gradient_of, tensors_in
from actckpt._cycles.kinds import Kind

__all__ = ["CycleKey", "CycleKeys", "ForwardKey", "KnownKinds"]

#: Maximum number of kinds with their own plan: the first ones, and including those that are larger than the first.
_OWN_PLANS, _MOST_PLANS = 16, 64


class ForwardKey(NamedTuple):
    """What a forward's part of a plan depends on."""

    #: Device, mode, autocast, trained parameters, and arguments that are no tensors.
    flags: Any
    #: For each tensor argument: its shape, and other properties.
    tensors: tuple[tuple[tuple[int, ...], Any], ...]

    def holds(self, other: ForwardKey) -> bool:
        """Return whether another forward exceeds this one in no dimension, and is otherwise the same."""
        if self.flags != other.flags or len(self.tensors) != len(other.tensors):
            return False
        return all(
            kind == other_kind and len(shape) == len(smaller) and all(map(operator.ge, shape, smaller))
            for (shape, kind), (smaller, other_kind) in zip(self.tensors, other.tensors, strict=True)
        )

    @property
    def num_elements(self) -> int:
        """The total number of elements of all tensors."""
        return sum(math.prod(shape) for shape, _ in self.tensors)


class CycleKey(NamedTuple):
    """Distinguishes kinds of cycles."""

    #: Whether gradients exist at the start.
    accumulates: bool
    #: The first forward.
    forward: ForwardKey


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


class KnownKinds:
    """Finds the kind of a cycle.

    Args:
        make: returns a new kind.
    """

    def __init__(self, make: Callable[[], Kind]) -> None:
        self._make = make
        self._kinds: dict[CycleKey, Kind] = {}
        #: Smaller ones that need their own plan.
        self._separate: set[CycleKey] = set()

    def all(self) -> list[Kind]:
        """Return all kinds with their own plan."""
        return [*self._kinds.values()]

    def forget(self) -> None:
        """Measure all kinds anew: the blocks are others."""
        self._kinds.clear()
        self._separate.clear()

    def find(self, key: CycleKey) -> tuple[Kind | None, bool]:
        """Return the kind as which a cycle runs (None: it recomputes all), and whether that is a larger one's."""
        if (known := self._kinds.get(key)) is not None:
            return known, False
        is_full = len(self._kinds) >= _MOST_PLANS
        if is_full or (len(self._kinds) >= _OWN_PLANS and key not in self._separate):
            larger = [
                (other, kind)
                for other, kind in self._kinds.items()
                if kind.can_be_shared and other.accumulates == key.accumulates and other.forward.holds(key.forward)
            ]
            if larger:
                return min(larger, key=lambda item: item[0].forward.num_elements)[1], True
        if not is_full:
            self._kinds[key] = self._make()
        return self._kinds.get(key), False

    def separate(self, key: CycleKey) -> None:
        """Give a smaller cycle its own plan."""
        if len(self._kinds) < _MOST_PLANS:
            self._separate.add(key)
