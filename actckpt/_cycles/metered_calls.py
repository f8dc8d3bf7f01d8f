"""The block calls of a metered cycle: each records its events, and is profiled if the cycle is measured."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from actckpt import _C
from actckpt._blocks.applied import CheckpointedForward
from actckpt._blocks.arguments import first_tensor
from actckpt._blocks.planned_size import given_bytes
from actckpt._budget.bandwidth import flush
from actckpt._budget.profiled_block import ProfiledBlock
from actckpt._budget.profiling import Profiler
from actckpt._core import torch_private
from actckpt._core.storages import storages_of, tensors_in
from actckpt._cycles.added_blocks import AddedBlocks
from actckpt._cycles.forward_life import ForwardLife, Held
from actckpt._cycles.kinds import Kind
from actckpt._cycles.settled_block import SettledBlock, settled
from actckpt._cycles.timeline import Call, Cycle

__all__ = ["MeteredCalls"]


class MeteredCalls:
    """Runs the calls of blocks in metered cycles of one model.

    Args:
        is_inside: whether a forward of the model runs in this thread.
        offloads: whether plans may offload.
        added: blocks that need not be blocks, if they cannot be profiled.
    """

    def __init__(self, is_inside: Callable[[], bool], offloads: Callable[[], bool], added: AddedBlocks) -> None:
        self._is_inside, self._added = is_inside, added
        self._offloads = offloads
        #: By device, and whether plans may offload.
        self._profilers: dict[tuple[torch.device, bool], Profiler] = {}
        self._cycle: Cycle | None = None
        self._kind: Kind | None = None
        #: Of the running forward.
        self.life: ForwardLife | None = None
        #: Of the measured cycle: calls as profiled, and as the first backward found them.
        self.profiled: list[ProfiledBlock] = []
        self.settled: list[SettledBlock] = []
        #: Storages that forwards of the cycle returned.
        self._returned: list[weakref.ref[torch.UntypedStorage]] = []

    def begin(self, cycle: Cycle | None = None, kind: Kind | None = None) -> None:
        """A cycle starts; None: it is over."""
        self._cycle, self._kind = cycle, kind
        self.profiled, self.settled, self._returned = [], [], []

    def returned(self, tensors: list[torch.Tensor]) -> None:
        """A forward of the model returned these."""
        if self._is_measuring():
            self._returned += map(weakref.ref, storages_of(tensors))

    @property
    def are_trained(self) -> bool:
        """Whether a profiled block has gradients to compute."""
        return any(block.costs.values and block.costs.values[0].nbytes for block in self.profiled)

    def _is_measuring(self) -> bool:
        return self._kind is not None and self._kind.is_measured_now

    def call(self, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any], record: Any) -> Any:
        """Run a block, with events at the start and end of its forward and of its backward."""
        cycle = self._cycle
        if cycle is None or not torch.is_grad_enabled():
            return forward.run_as_set(args, kwargs, record)
        is_other = cycle.thread != threading.get_ident()
        if not self._is_inside() and (not is_other or torch_private.current_graph_task_id() != -1):
            # A reentrant backward reruns blocks, outside of any forward of the model.
            return forward.run_as_set(args, kwargs, record)
        if is_other:
            cycle.is_void = True
            return forward.run_as_set(args, kwargs, record)
        number = self._begin_call(cycle, forward, args, kwargs)
        try:
            if self._is_measuring():
                result = self._profile(forward, args, kwargs)
            else:
                result = forward.run_as_set(args, kwargs, record)
        except BaseException:  # no hook runs at the end of an interrupted forward
            cycle.is_void = True
            raise
        cycle.note("forward ends", number)
        output = next((tensor for tensor in tensors_in(result) if tensor.grad_fn is not None), None)
        held = None if self.life is None else self.life.in_blocks
        if output is not None:
            output.register_hook(lambda _: self._backward_begins(cycle, number, held))
        return result

    def _begin_call(
        self, cycle: Cycle, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int:
        number = len(cycle.calls)
        cycle.calls.append(Call(forward.name, cycle.num_forwards - 1, given_bytes((args, kwargs))))
        source = first_tensor((args, kwargs))
        if source is not None and source.requires_grad:
            _ = source.grad_fn  # for a view that was written to, torch recreates it when it is read, not for a hook
            source.register_hook(lambda _: cycle.note("backward ends", number))
        cycle.note("forward begins", number)
        return number

    def _profile(self, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._cycle is not None and self._cycle.meter is not None
        offloads = self._offloads()
        key = self._cycle.device, offloads
        if key not in self._profilers:
            self._profilers[key] = Profiler(offloads=offloads, step=self._unmuted)
        with self._cycle.meter.muted():
            failed = self._added.reject if forward.name in self._added else None
            profiler, original = self._profilers[key], forward.original()
            if self._added.rejects(profiler.running):  # this block runs inside of one that was added
                return original(*args, **kwargs)
            result, block = profiler.call(forward.name, forward.block, original, args, kwargs, failed)
            if offloads:
                flush(self._cycle.device)  # offloads of timed blocks are not part of the step
        if block is not None:  # else the cycle is measured again
            self.profiled.append(block)
            self._cycle.casts += [cast.storage for cast in block.casts]
            for storage in filter(None, (cast.storage() for cast in block.casts)):
                weakref.finalize(storage, self._cast_died, self._cycle).atexit = False
        return result

    def _unmuted(self) -> Any:
        assert self._cycle is not None and self._cycle.meter is not None
        return self._cycle.meter.unmuted()

    def _cast_died(self, cycle: Cycle) -> None:
        if cycle is self._cycle and not any(storage() is not None for storage in cycle.casts):
            cycle.casts_released()

    def _backward_begins(self, cycle: Cycle, number: int, held: Held | None) -> None:
        self.settle(cycle)
        retains_graph = torch_private.keeps_graph()
        cycle.note("backward begins", number, retains_graph=retains_graph)
        if (
            held is not None
            and held.life.backward_reaches_block(retains_graph=retains_graph)
            and self._kind is not None
        ):
            self._kind.outlives_outputs = True
        _C.when_backward_ends(lambda: cycle.note("backward"))

    def settle(self, cycle: Cycle) -> None:
        """A backward reached outputs: determine which dropped values of profiled blocks are alive."""
        if cycle is self._cycle and len(self.settled) < len(self.profiled):
            self.settled += settled(self.profiled[len(self.settled) :], set(map(id, self._returned)))
