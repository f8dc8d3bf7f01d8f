"""What counts toward a budget."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable

import torch

from actckpt._budget.class_names import with_block_names
from actckpt._budget.measuring import MeasuredStep
from actckpt._budget.running import device_of
from actckpt._budget.sizes import budget_bytes
from actckpt._core import devices
from actckpt._core.storages import storages_of
from actckpt._core.subclasses import plain_parts
from actckpt._core.training_state import TrainingState
from actckpt._offload import stores
from actckpt.memory import LiveStorages

__all__ = ["FixedBytes", "Meter"]

#: On a CPU, forwards after which all is counted again.
_FORWARDS_BETWEEN = 100


class Meter:
    """Measures peaks, of all memory or of activations alone.

    Of all memory, on a device what its allocator has given out; on a CPU parameters, buffers, gradients, the state of
    optimizers, and tensors that the step makes. Of activations, tensors that the step makes, without gradients of
    parameters once they are accumulated.

    Args:
        keeps_gradients: some forwards begin with the gradients of those before, as where they are summed up over
            several: then all of them are there all the time, also in a forward that begins without.
        are_read_together: one backward reads several forwards (NOTE [ Forwards that are alive ], Rule 4).
        held_bytes: of a device, what its allocator had given out when no forward was alive; None: none is now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        *,
        total: bool,
        keeps_gradients: bool = False,
        are_read_together: bool = False,
        held_bytes: int | None = None,
    ) -> None:
        self._model, self._total, self._sums = model, total, are_read_together
        self._keeps_gradients = total and (keeps_gradients or are_read_together)
        self._device = device_of(model)
        #: Whether all that is on the device now is fixed, whoever made it.
        self.counts_all_there = total and held_bytes is None and devices.counting(self._device) is not None
        if held_bytes is None or devices.counting(self._device) is None:
            held_bytes = _static_bytes(model, optimizers, self._device) if total else 0
        self.held_bytes = held_bytes
        #: Of what counts, there all the time.
        self.fixed_bytes = held_bytes + (_bytes_without_gradient(model) if self._keeps_gradients else 0)
        if are_read_together and (keeps_gradients or not total):  # else what waits becomes the gradient
            self.fixed_bytes += sum(map(_bytes_of_gradient, model.parameters()))

    def budget_bytes(self, budget: object) -> float:
        """Return a budget of all memory in bytes."""
        return budget_bytes(budget, self._device, held_bytes=self.held_bytes)

    def complete(self, measured: MeasuredStep) -> MeasuredStep:
        """Return what was measured of a step with what is there all the time, and with gradients where they count.

        What several calls of blocks add up to one gradient is there, and is nobody's yet, from the last of them on.
        What is added to a gradient that is there is another tensor until then; blocks were profiled with theirs.
        """
        parameters, others = measured.parameters_in(self._model)
        num_uses = Counter(id(parameter) for each in parameters for parameter in each)
        costs, classes, stack = measured.costs, {}, []
        unseen = [parameter for parameter in self._model.parameters() if id(parameter) not in num_uses]
        parameters[-1], others[-1] = [*parameters[-1], *unseen], [*others[-1], *unseen]  # at worst, the head reads them
        found = []
        for each, outside in zip(reversed(parameters), reversed(others), strict=True):  # in the order of backward
            added_bytes = self._added_bytes(outside, num_uses, is_seen=measured.sees_backward)
            if self._sums:  # also with those of blocks, which were profiled with the gradients themselves
                added_bytes = max(added_bytes, *map(_bytes_of_gradient, each), 0)
            found.append((self._gradient_bytes(each, num_uses), added_bytes))
        nbytes, added_bytes = found[0]
        found[0] = nbytes, max(added_bytes - int(measured.loss_more_bytes), 0)
        for name, old, (nbytes, added_bytes) in zip(measured.names, costs.stack, reversed(found), strict=True):
            new = f"{old}, {nbytes + added_bytes}" if nbytes + added_bytes and name is not None else old
            needed = costs.classes[old].working_set_bytes + added_bytes
            classes[new] = dataclasses.replace(
                costs.classes[old], gradient_bytes=float(nbytes), working_set_bytes=needed
            )
            stack.append(new)
        costs = dataclasses.replace(costs, classes=classes, stack=tuple(stack), fixed_bytes=float(self.fixed_bytes))
        return dataclasses.replace(measured, costs=with_block_names(costs, measured.names))

    def _gradient_bytes(self, parameters: list[torch.nn.Parameter], num_uses: Counter[int]) -> int:
        """Return the bytes of the gradients that backward begins with some parameters; takes down what it began."""
        nbytes = 0
        for parameter in parameters:
            is_shared = num_uses[id(parameter)] > 1
            is_begun = self._keeps_gradients or parameter.grad is not None
            waits = is_shared and not self._sums  # else it counts all the time
            if waits or (self._total and num_uses[id(parameter)] >= 0 and not is_begun):
                nbytes += _bytes_of_gradient(parameter)
            if is_shared:
                num_uses[id(parameter)] = -1
        return nbytes

    def _added_bytes(self, parameters: list[torch.nn.Parameter], num_uses: Counter[int], *, is_seen: bool) -> int:
        """Return the bytes of the largest gradient that is there until it is added to one that counts, or is that.

        Args:
            is_seen: what backward needs outside of blocks was measured.
        """
        if is_seen and not self._keeps_gradients:
            return 0
        most = 0
        for parameter in parameters:
            num = num_uses[id(parameter)]
            # What is added to a sum that waits makes another sum.
            is_sum = num < 0 or self._sums
            times = 2 if is_sum else int(self._keeps_gradients or not (num > 1 or self._total))
            most = max(most, times * _bytes_of_gradient(parameter))
        return most

    def peak_of(self, run: Callable[[], object], state: TrainingState) -> float:
        """Run a step and return its peak, in bytes; of activations, that before its optimizer begins."""
        allocator = devices.counting(self._device) if self._total else None
        if allocator is not None:
            allocator.reset_peak(self._device)
            run()
            return float(allocator.peak_bytes(self._device))
        with LiveStorages(parameters=() if self._total else self._model.parameters(), device=self._device) as live:
            if self._total:
                run()
                return float(self.fixed_bytes + live.peak_bytes)
            return float(_peak_before_update(live, run, state))


def _peak_before_update(live: LiveStorages, run: Callable[[], object], state: TrainingState) -> int:
    """Run a step and return its peak up to its optimizer, whose state and intermediate results are no activations."""
    peaks: list[int] = []
    with state.before_update(lambda: peaks.append(live.peak_bytes)):
        run()
    return peaks[0] if peaks else live.peak_bytes


class FixedBytes:
    """Tells what counts all the time, at each forward, without a walk through the model where nothing changed.

    On a device its allocator tells. Elsewhere the bytes change with parameters and buffers, with which parameters have
    gradients, and with the state of the optimizers; what changes otherwise is seen at one of so many forwards.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], fixed_bytes: float
    ) -> None:
        self._optimizers, self._bytes = optimizers, fixed_bytes
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._has_allocator = devices.counting(device_of(model)) is not None
        self._seen, self._num_left = self._signature(), _FORWARDS_BETWEEN

    def now(self, walk: Callable[[], Meter]) -> float:
        """Return the bytes now; `walk` makes a meter."""
        signature = self._signature()
        self._num_left -= 1
        if self._has_allocator or signature != self._seen or not self._num_left:
            self._bytes, self._seen, self._num_left = float(walk().fixed_bytes), signature, _FORWARDS_BETWEEN
        return self._bytes

    def _signature(self) -> object:
        if self._has_allocator:
            return None
        found = [module for ref in self._modules if (module := ref()) is not None]
        parameters = [
            None if parameter is None else (parameter.nbytes, parameter.grad is not None)
            for module in found
            for parameter in module._parameters.values()
        ]
        buffers = [None if buffer is None else buffer.nbytes for module in found for buffer in module._buffers.values()]
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return parameters, buffers, [len(state) if isinstance(state, dict) else 0 for state in states]


def _bytes_of_gradient(parameter: torch.nn.Parameter) -> int:
    """Return the bytes that backward allocates for a gradient: of a sharded parameter those of its shard."""
    if not parameter.requires_grad:
        return 0
    return sum(part.nbytes for part in plain_parts(parameter.detach()))


def _bytes_without_gradient(model: torch.nn.Module) -> int:
    return sum(_bytes_of_gradient(parameter) for parameter in model.parameters() if parameter.grad is None)


def _static_bytes(model: torch.nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], device: torch.device) -> int:
    allocator = devices.counting(device)
    if allocator is not None:
        inflight_bytes = stores.inflight_bytes(device)  # first: asking releases what has passed
        return allocator.allocated_bytes(device) - inflight_bytes
    held: list[object] = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    for optimizer in optimizers:
        held += [list(state.values()) for state in optimizer.state.values() if isinstance(state, dict)]
    storages = {id(storage): storage for storage in storages_of(held)}
    return sum(storage.nbytes() for storage in storages.values() if storage.device.type == device.type)
