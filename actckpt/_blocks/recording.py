"""What the blocks of an applied model saved in one step, recorded for `actckpt.report(model)`.

The first step is recorded, and the one after each report; the steps in between have no overhead. A step starts with the
first forward of a block after a backward reached one of them. Forwards whose graph was dropped without a backward do
not count.

Where operators are replayed, the recorder knows what made a value. Hooks of reruns see only tensors and the running
module, and hooks of `offload` only count. Each storage counts once, as held if any block holds it: the next block may
hold as its input what one block drops.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import torch_private
from actckpt._core.region_report import READ, SMALL, Figures, RecordedValue
from actckpt._core.sites import module_name
from actckpt._core.storages import storages_of
from actckpt._offload.session import Offloading
from actckpt._text.sizes import format_bytes
from actckpt.action import Action

__all__ = ["RecordedCall", "Recording"]

_WHY_INPUT = "the rerun starts from it"


class _Graph:
    """Has the lifetime of one call's graph."""


class RecordedCall:
    """One forward of a block, as a context around it."""

    def __init__(self, block: torch.nn.Module) -> None:
        self._block = block
        #: Data of a region with a policy, and of an `offload` block, while it runs.
        self.figures = Figures()
        self.offloading: Offloading | None = None
        self._entries: list[Any] = self.figures.entries
        #: What reruns drop, by the weak reference to its storage, which is unique while the storage is alive.
        self._saved: dict[int, RecordedValue] = {}
        #: What it holds that is not among them.
        self._held: list[RecordedValue] = []
        #: Storages of parameters and buffers; they outlive the call.
        self._parameters: set[int] | None = None
        self._before: Callable[[Tensor], object] | None = None
        self._graph: weakref.ref[_Graph] | None = None

    def __enter__(self) -> RecordedCall:
        self._before = _C.set_saved_tensor_observer(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        _C.set_saved_tensor_observer(self._before)
        if self.offloading is not None:
            self._entries = _moved_and_small(self.offloading)
        del self.figures, self.offloading  # they hold what only an open region needs

    def holds(self, arguments: Any, action: Action) -> None:
        """Record the inputs of a rerun: held or offloaded, from the forward on."""
        for storage in {id(storage): storage for storage in storages_of(arguments)}.values():
            if self._is_parameter(storage):
                continue
            reference = weakref.ref(storage)
            was_saved = self._saved.pop(id(reference), None) is not None
            why = _WHY_INPUT if was_saved else READ
            self._held.append(RecordedValue("(input)", None, action, why, reference, storage.nbytes()))

    def keeps(self, num_values: int, nbytes: int) -> None:
        """Record what a block without checkpointing holds, which only its plan knows."""
        self._held.append(RecordedValue("(as it is)", None, Action.KEEP, "", None, nbytes, num_values=num_values))

    def _is_parameter(self, storage: torch.UntypedStorage) -> bool:
        if self._parameters is None:
            tensors = [*self._block.parameters(), *self._block.buffers()]
            self._parameters = {id(storage) for storage in storages_of(tensors)}
        return id(storage) in self._parameters

    @torch_private.untraced
    def _note(self, tensor: Tensor) -> None:
        for storage in storages_of(tensor):
            reference = weakref.ref(storage)
            if id(reference) not in self._saved and not self._is_parameter(storage):
                taken = RecordedValue("(rerun)", module_name(), Action.RECOMPUTE, "", reference, storage.nbytes())
                self._saved[id(reference)] = taken

    def entries(self) -> list[Any]:
        """Return what became of each value."""
        return [*self._entries, *self._held, *self._saved.values()]

    def ends_with(self, graph: _Graph) -> None:
        """Make it count while a graph is alive."""
        self._graph = weakref.ref(graph)

    def is_alive(self) -> bool:
        """Whether its graph is alive."""
        return self._graph is not None and self._graph() is not None


def _moved_and_small(block: Offloading) -> list[RecordedValue]:
    """Return what an `offload` block offloaded, and what stayed because it is small."""
    report = block.report()
    num_small = sum(row.not_replayed.get(SMALL, 0) for row in report.rows)
    num_moved = sum(row.num_values for row in report.rows) - num_small
    why = f"{SMALL}={format_bytes(block.min_bytes)}" if num_small else ""
    return [
        RecordedValue("(offload)", None, Action.OFFLOAD, "", None, report.offloaded_bytes, num_values=num_moved),
        RecordedValue("(offload)", None, Action.KEEP, why, None, report.kept_bytes, num_values=num_small),
    ]


class Recording:
    """The calls of all blocks in the last recorded step."""

    def __init__(self) -> None:
        self._calls: dict[int, list[RecordedCall]] = {}
        self._is_over = False
        #: Number of recorded steps.
        self.num_steps = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return Recording, ()  # a copy starts empty

    def begin(self, forward: object, block: torch.nn.Module) -> RecordedCall:
        """Return the record of a block call that starts."""
        if self._is_over:
            self._calls.clear()
            self._is_over = False
        self.num_steps += not self._calls
        calls = [call for call in self._calls.get(id(forward), ()) if call.is_alive()]
        call = RecordedCall(block)
        self._calls[id(forward)] = [*calls, call]
        return call

    def watch(self, call: RecordedCall, tensor: Tensor, reached: Callable[[], None]) -> None:
        """Detect when a backward reaches a result of a call."""
        graph = _Graph()
        call.ends_with(graph)
        tensor.register_hook(functools.partial(self._reached, graph, reached))

    def _reached(self, graph: _Graph, reached: Callable[[], None], grad: Tensor) -> None:
        self._is_over = True
        reached()

    def entries_of(self, forward: object) -> list[Any]:
        """Return what became of a block's values, over its calls in the step."""
        return [entry for call in self._calls.get(id(forward), ()) for entry in call.entries()]
