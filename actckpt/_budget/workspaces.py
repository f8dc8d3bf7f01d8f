"""The peak of device memory while some code runs: live storages, and workspaces of operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from actckpt._core import devices
from actckpt.memory import LiveStorages

__all__ = ["WorkingStorages"]


class WorkingStorages(LiveStorages):
    """Counts live storages; its peak includes the workspaces of operators that allocator statistics show.

    The bytes allocated while an operator ran are an upper bound: its workspaces may have existed one after the other.
    If the allocator's own peak is lower, that counts.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._allocator = device, devices.counting(device)
        self._most_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._allocator is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        live_bytes, given_bytes = self.live_bytes, self._allocator.given_bytes(self._device)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given_bytes = self._allocator.given_bytes(self._device) - given_bytes
        self._most_bytes = max(self._most_bytes, live_bytes + given_bytes)
        return result

    @property
    def peak_bytes(self) -> int:
        """Peak bytes since the start or the last `reset_peak`."""
        return max(self._most_bytes, self._peak_bytes)

    def reset_peak(self) -> None:
        """Reset the peak to the live bytes."""
        super().reset_peak()
        self._most_bytes = 0

    @contextmanager
    def section(self) -> Iterator[None]:
        """Count what runs in the body; nothing in it was allocated before, or stays alive unseen."""
        allocator = self._allocator
        with self:
            if allocator is None:
                yield
                return
            started_bytes = allocator.allocated_bytes(self._device) - self.live_bytes
            before_bytes, most_bytes = allocator.peak_bytes(self._device), self._most_bytes
            self._most_bytes = 0
            yield
        peak_bytes = allocator.peak_bytes(self._device)
        seen_bytes = peak_bytes - started_bytes
        if peak_bytes == before_bytes:  # the allocator's peak did not rise
            seen_bytes = min(seen_bytes, self._most_bytes)
        self._most_bytes = max(most_bytes, seen_bytes)
