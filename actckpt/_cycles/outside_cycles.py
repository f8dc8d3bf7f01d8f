"""Memory that the step of `plan` needs outside of cycles, and that counts in them."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from actckpt._budget.budget_config import BudgetConfig
from actckpt._core import devices, torch_private
from actckpt._core.storages import gradient_of, storages_of
from actckpt.memory import LiveStorages

__all__ = ["OutsideCycles"]


class _Made(LiveStorages):
    """Counts storages that are created before the forward of the model."""

    def alive(self, not_counted: list[Any]) -> list[tuple[weakref.ref[torch.UntypedStorage], int]]:
        """Return the live storages and their bytes, without those of some tensors."""
        left_out = {id(storage) for storage in storages_of(not_counted)}
        with self._lock:
            self._count_deaths()
            entries = [(entry, entry.nbytes) for entry in self._entries.values()]
        return [(entry, nbytes) for entry, nbytes in entries if entry.key not in left_out]


class OutsideCycles:
    """Counts memory of a step that its cycle does not see. A cycle starts at the forward of the model.

    1. What the step allocates before the forward, and frees before it ends: a batch that it loads.
    2. The state that the optimizer allocates after the cycle. Each step of `plan` starts without it, and each later
       training step with it. State that is allocated inside backward is part of the cycle.

    Enter it around the first step.
    """

    def __init__(self, model: torch.nn.Module, config: BudgetConfig, device: torch.device) -> None:
        self._model, self._config, self._device = model, config, device
        self._thread = threading.get_ident()
        self._mode: _Made | None = None
        self._is_before_forward = True
        #: Created before the forward: storages, and the bytes of those that count.
        self._made: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._made_bytes = 0
        #: Optimizer state bytes: after the first step, without those made in backward; before an update; made in
        #: backward.
        self._state_bytes = self._begin_bytes = self._in_backward_bytes = 0

    def nbytes(self) -> int:
        """Return the bytes that count in a cycle that begins now."""
        if self._is_before_forward and self._mode is not None:
            self._is_before_forward = False
            gradients = [gradient_of(parameter) for parameter in self._model.parameters()]
            self._made = self._mode.alive([gradients, self._config.optimizer_states()])
            self._made_bytes = sum(nbytes for _, nbytes in self._made)
            if threading.get_ident() == self._thread:  # a mode leaves only the stack of its own thread
                self._end_mode()
        if not self._config.is_total:
            return self._made_bytes
        return self._made_bytes + max(0, self._state_bytes - self._config.optimizer_bytes(self._device))

    def __enter__(self) -> None:
        self._hooks = [
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ends),
        ]
        if not self._config.is_total or devices.counting(self._device) is None:  # else the allocator counts it
            self._mode = _Made(device=self._device)
            self._mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_mode()
        for hook in self._hooks:
            hook.remove()
        # What stays alive exists before the next step: caches that the first step fills.
        self._made_bytes = sum(nbytes for storage, nbytes in self._made if storage() is None)
        self._made = []
        self._state_bytes = self._config.optimizer_bytes(self._device) - self._in_backward_bytes

    def _end_mode(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def _update_begins(self, *_: object) -> None:
        self._begin_bytes = self._config.optimizer_bytes(self._device)

    def _update_ends(self, *_: object) -> None:
        if torch_private.current_graph_task_id() != -1:
            self._in_backward_bytes += self._config.optimizer_bytes(self._device) - self._begin_bytes
