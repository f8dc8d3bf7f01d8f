"""The first forward of a model under a budget: everything is checkpointed, and blocks are profiled."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from actckpt._blocks.applied import CheckpointedForward
from actckpt._blocks.arguments import first_tensor
from actckpt._blocks.outside import OutsideModules
from actckpt._blocks.planned_size import given_bytes
from actckpt._budget.cached_casts import CachedCasts, beside_casts, holding_casts
from actckpt._budget.first_step import FirstStep
from actckpt._budget.links import flush
from actckpt._budget.marks import Marks, Outside, begins, between, held_after, last_end, outside_bytes
from actckpt._budget.measuring import MeasuredStep, cost_table
from actckpt._budget.outside_graph import OutsideGraph
from actckpt._budget.profiled_block import ProfiledBlock, as_given
from actckpt._budget.profiling import Profiler
from actckpt._budget.workspaces import NumberedStorages
from actckpt._core import devices
from actckpt._core.storages import tensors_in

__all__ = ["Watching"]


class Watching:
    """A forward in which everything is checkpointed and profiled.

    Args:
        least_bytes: by the name of the block, of each tensor: the forward is given up where the block that runs first
            is given less of each.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forwards: dict[str, CheckpointedForward],
        device: torch.device,
        first_step: FirstStep,
        graph: OutsideGraph,
        *,
        offloads: bool,
        least_bytes: Mapping[str, tuple[float, ...]],
    ) -> None:
        self._graph = graph
        self._least_bytes = least_bytes
        #: Whether the first block was given less: then blocks run as they are set.
        self.is_too_small = False
        self._forwards, self._device, self._first_step = forwards, device, first_step
        self._profiler = Profiler(offloads=offloads)
        self._profiled: list[ProfiledBlock] = []
        self.casts = CachedCasts()
        self._live = NumberedStorages(device)
        self._marks = Marks(self._live, device)
        self._is_closed = False
        #: What each block was given in its first call.
        self.given_bytes: dict[str, tuple[float, ...]] = {}
        #: Whether a block returned what backward may begin with.
        self.is_trained = False
        self.thread = threading.get_ident()
        for name, forward in forwards.items():
            forward.instead = _Instead(self, name)
        self._outside = OutsideModules(model, forwards, self._live)
        self._live.__enter__()
        self._marks.note("start")

    def call(self, name: str, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a block. What runs without gradients saves nothing, and counts for nothing, as under a plan."""
        if not torch.is_grad_enabled():
            return forward.original()(*args, **kwargs)
        number, source = len(self._profiled), first_tensor((args, kwargs))
        given = given_bytes((args, kwargs))
        least = self._least_bytes.get(name)
        if not number and least and all(now < most for now, most in zip(given, least, strict=False)):
            self.is_too_small = True
            self.close()
            return forward.run(args, kwargs, None)
        self.given_bytes.setdefault(name, given)
        self.casts.call_begins()
        self._marks.begins(number, (args, kwargs), _gathered_bytes(forward.block))
        self._graph.call_begins((args, kwargs))
        try:
            with self._live.paused():
                result, profiled = self._profiler.call(name, forward.block, forward.original(), args, kwargs)
        except BaseException:  # of an interrupt no hook tells
            self.close()
            raise
        self._graph.call_ended()
        self.is_trained = self.is_trained or any(tensor.requires_grad for tensor in tensors_in(result))
        self._profiled.append(profiled)
        self.casts.call_ended(profiled, functools.partial(self._live.has_made, since=0))
        output, casts, live = first_tensor(result), self.casts, self._live
        if profiled.casts and output is not None and output.grad_fn is not None:
            num_made = live.num_made
            output.register_hook(lambda _: casts.backward_reached(live.cast_bytes(since=num_made)))
        self._first_step.block_ends()
        output_bytes = self._marks.ends(number, (args, kwargs), result)
        self._first_step.block_ended(source, result, output_bytes)
        return result

    def close(self) -> None:
        """The forward has ended. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._marks.note("done")
        self._marks.settle()
        self._live.__exit__(None, None, None)
        self._outside.close()
        self._first_step.forward_ended()
        for forward in self._forwards.values():
            forward.instead = None

    def held_bytes(self) -> int:
        """Return the bytes of what lives when the forward has ended, and was made after its last block."""
        num_calls = len(self._profiled)
        return held_after(self._marks.found, num_calls) if num_calls else 0

    def measured(self, outputs: list[torch.Tensor]) -> MeasuredStep | None:
        """Return what was found, None where no block ran."""
        num_calls = len(self._profiled)
        if not num_calls:
            return None
        profiled, casts = self.casts.settled(self._profiled)
        marks = holding_casts(self._marks.found, casts)
        read = self._graph.read(outputs, self._live.made_before())
        has_allocator = devices.counting(self._device) is not None  # it tells of this step, and of those that follow
        backward_bytes = read.backward_bytes if has_allocator else beside_casts(read.backward_bytes, casts)
        stem, head = outside_bytes(marks, num_calls, backward_bytes)
        forward_s = devices.seconds_between(last_end(marks, num_calls).moment, marks[-1].moment)
        head = Outside(forward_s, 2 * forward_s, head.working_set_bytes)
        flush(self._device)
        profiled = [each.with_input_kept() for each in as_given(profiled, begins(marks))]
        found = cost_table(profiled, stem, between(marks, num_calls, backward_bytes), head, read)
        return dataclasses.replace(found, casts_found=self.casts.found(), made_outside=self._outside.made())


def _gathered_bytes(block: torch.nn.Module) -> int:
    """Return the bytes of the parameters of a block that FSDP2 has gathered, as it has when its forward runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(block, fsdp.FSDPModule):
        return 0
    return sum(parameter.nbytes for parameter in block.parameters())


class _Instead:
    """Takes the call of one block."""

    def __init__(self, watching: Watching, name: str) -> None:
        self._watching, self._name = watching, name

    def __call__(self, forward: CheckpointedForward, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Any:
        return self._watching.call(self._name, forward, args, kwargs)
