"""What a device has at most at once while some code runs: what lives, and the workspaces of operators."""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from actckpt._budget.structure import is_cast_of_parameter
from actckpt._C import is_paused
from actckpt._core import devices, torch_private
from actckpt._core.storages import storages_of
from actckpt.memory import LiveStorages

__all__ = ["NumberedStorages", "WorkingStorages"]


class WorkingStorages(LiveStorages):
    """Counts what lives, and in its peak also the workspaces of operators, as far as an allocator tells them.

    What the allocator gave out while an operator ran is the most that this can have held at once: its workspaces may
    have been there one after the other. Where the allocator's own peak tells that it was less, that counts.
    """

    def __init__(self, device: torch.device, *, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(parameters=parameters)
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
        """Most bytes since the start or the last `reset_peak`."""
        return max(self._most_bytes, self._peak_bytes)

    def reset_peak(self) -> None:
        """Start the peak again from what is alive now."""
        super().reset_peak()
        self._most_bytes = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave workspaces out for a while: to ask the allocator takes time."""
        allocator, self._allocator = self._allocator, None
        try:
            yield
        finally:
            self._allocator = allocator

    @contextmanager
    def section(self) -> Iterator[None]:
        """Count what runs inside, nothing of which was given out before or lives on unseen."""
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
        if peak_bytes == before_bytes:  # it was no more than that
            seen_bytes = min(seen_bytes, self._most_bytes)
        self._most_bytes = max(most_bytes, seen_bytes)


class NumberedStorages(WorkingStorages):
    """Takes down in which order storages are made, and of each the number of the node that autograd makes next.

    What audits make, a step under a plan does not: checksums, and copies that are on their way to a store.
    """

    def __init__(self, device: torch.device, *, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(device, parameters=parameters)
        self._numbers: dict[int, int] = {}
        self._orders: dict[int, int] = {}
        #: Storages so far.
        self.num_made = 0
        #: Casts of parameters, with how many storages had been made by then.
        self._casts: list[tuple[int, weakref.ref[torch.UntypedStorage]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if is_cast_of_parameter(func, args):
            self._casts += ((self.num_made, weakref.ref(storage)) for storage in storages_of(result))
        return result

    def cast_bytes(self, *, since: int) -> int:
        """Return the bytes of the casts of parameters that live, and were made after so many storages."""
        alive = (storage for num, each in self._casts if num > since and (storage := each()) is not None)
        return sum(storage.nbytes() for storage in alive)

    def _note_output(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        if is_paused():
            return
        known = self._entry(storage)
        super()._note_output(storage, is_new=is_new)
        if known is None:
            self._numbers[id(storage)] = torch_private.next_sequence_number()
            self._orders[id(storage)] = self.num_made
            self.num_made += 1

    def has_made(self, storage: torch.UntypedStorage, *, since: int) -> bool:
        """Return whether an operator made a storage here, after so many others."""
        with self._lock:
            return self._entry(storage) is not None and self._orders[id(storage)] >= since

    def made_by(self) -> Callable[[int], int]:
        """Return what tells how many bytes of what is alive were there when so many storages had been made."""
        return self._sums(self._orders, bisect.bisect_left)

    def made_before(self) -> Callable[[int], int]:
        """Return what tells how many bytes of what is alive were there before the operator of a node ran, by number."""
        return self._sums(self._numbers, bisect.bisect_right)  # a node is made before its operator runs

    def _sums(self, numbers_of: dict[int, int], find: Callable[[list[int], int], int]) -> Callable[[int], int]:
        with self._lock:
            self._count_deaths()
            entries = [(numbers_of[key], entry.nbytes) for key, entry in self._entries.items() if not entry.is_gradient]
        entries.sort()
        numbers = [number for number, _ in entries]
        sums = list(itertools.accumulate((nbytes for _, nbytes in entries), initial=0))
        return lambda number: sums[find(numbers, number)]
