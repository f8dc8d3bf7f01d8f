"""What cycles leave behind for later cycles of a step: casts in autocast's cache, outputs that the program holds."""

from __future__ import annotations

import weakref

import torch

from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.running import device_of
from actckpt._core import devices
from actckpt._core.storages import storages_of
from actckpt._cycles.allocator_meter import Older
from actckpt._cycles.kinds import Kind
from actckpt._cycles.meter import Meter
from actckpt._cycles.timeline import Cycle

__all__ = ["Leftovers"]

#: Leaving behind more than this share of the peak counts as much.
_MUCH = 0.01


class Leftovers:
    """Tracks which bytes counted by metered cycles are still alive.

    Args:
        model: the model whose cycles these are. A copy has no parameters yet when this is made.
    """

    def __init__(self, config: BudgetConfig, model: torch.nn.Module) -> None:
        self._config, self._model = config, model
        #: Meters of earlier cycles, while bytes that they counted are alive; None: the last cycle had no meter.
        self._meters: list[Meter] | None = None
        self._last_peak_bytes = 0
        #: On a device: storages that forwards returned.
        self._outputs: list[Older] = []
        self._is_much = False
        #: Whether every cycle is metered, because a later cycle of its step must know what it leaves behind.
        self._meters_all = False

    def count(self) -> bool:
        """Return whether memory of earlier micro-batches of a step counts in later ones.

        Gradients do if all memory counts. So do casts in autocast's cache, and outputs that the program holds.
        """
        if self._meters:
            left_bytes = sum(meter.left_bytes([]) for meter in self._meters)
            self._is_much = self._is_much or left_bytes > _MUCH * self._last_peak_bytes
        return self._config.is_total or torch.is_autocast_enabled(device_of(self._model).type) or self._is_much

    def nbytes(self, kind: Kind | None, gradients: list[torch.Tensor], *, accumulates: bool) -> int:
        """Return the bytes that count when a cycle of this kind starts, without gradients and optimizer state."""
        if kind is None or not (accumulates or self._config.is_total):
            return 0
        if self._meters is not None:
            counted = [*gradients, *self._config.optimizer_states()]
            kind.left_bytes = sum(meter.left_bytes(counted) for meter in self._meters)
        return kind.left_bytes

    def meters(self, is_metered: bool, *, accumulates: bool) -> bool:
        """Return whether a cycle is metered, even if its kind does not request it."""
        if devices.counting(device_of(self._model)) is not None:  # the allocator counts it already
            return is_metered
        if accumulates:
            self._meters_all = is_metered and self._meters is None
        return is_metered or self._meters_all

    def add(self, cycle: Cycle) -> None:
        meter, before = cycle.meter, self._meters or []
        self._meters = None if meter is None else [other for other in (*before, meter) if other.left_bytes([])]
        self._last_peak_bytes = cycle.peak_bytes

    def returned(self, tensors: list[torch.Tensor]) -> None:
        """A forward of the model returned these: they may die in a later cycle."""
        if not self._config.is_total and devices.counting(device_of(self._model)) is not None:
            self._outputs += [(weakref.ref(storage), storage.nbytes()) for storage in storages_of(tensors)]

    def not_counted(self, *, is_metered: bool) -> tuple[list[torch.nn.Parameter], list[Older]]:
        """Return parameters whose gradients do not count toward the budget, and storages from before."""
        if self._config.is_total or not (is_metered or devices.counting(device_of(self._model)) is not None):
            return [], []
        self._outputs = [item for item in self._outputs if item[0]() is not None]
        # Original parameters of FSDP1 are views while its flat one is gathered.
        leaves = [item for item in self._model.parameters() if item.requires_grad and item.is_leaf]
        return leaves, [*self._outputs]
