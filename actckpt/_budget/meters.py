"""What counts toward a budget."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import torch

from actckpt._budget.measuring import MeasuredStep
from actckpt._budget.running import device_of
from actckpt._budget.sizes import budget_bytes
from actckpt._core import devices
from actckpt._core.storages import storages_of
from actckpt._core.subclasses import plain_parts
from actckpt._offload import stores
from actckpt.memory import LiveStorages

__all__ = ["Meter"]


class Meter:
    """Measures peaks, of all memory or of activations alone.

    Of all memory, on a device what its allocator has given out; on a CPU parameters, buffers, gradients, the state of
    an optimizer, and tensors that the step makes. Of activations, tensors that the step makes, without gradients of
    parameters once they are accumulated.

    Args:
        keeps_gradients: some forwards begin with the gradients of those before, as where they are summed up over
            several: then all of them are there all the time, also in a forward that begins without.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        total: bool,
        keeps_gradients: bool = False,
    ) -> None:
        self._model, self._total, self._keeps_gradients = model, total, total and keeps_gradients
        self._device = device_of(model)
        self._held_bytes = _static_bytes(model, optimizer, self._device) if total else 0
        #: Of what counts, there all the time.
        self.fixed_bytes = self._held_bytes + (_bytes_without_gradient(model) if self._keeps_gradients else 0)

    def budget_bytes(self, budget: object) -> float:
        """Return a budget of all memory in bytes."""
        return budget_bytes(budget, self._device, held_bytes=self._held_bytes)

    def complete(self, measured: MeasuredStep) -> MeasuredStep:
        """Return what was measured of a step with what is there all the time, and with gradients where they count.

        What several calls of blocks add up to one gradient is there, and is nobody's yet, from the last of them on.
        What is added to a gradient that is there is another tensor until then; blocks were profiled with theirs.
        """
        named = dict(self._model.named_modules())
        parameters = [list(named[name].parameters()) if name is not None else [] for name in measured.names]
        num_uses = Counter(id(parameter) for each in parameters for parameter in each)
        if not self._total and all(num == 1 for num in num_uses.values()):
            return measured
        costs, classes, stack = measured.costs, {}, []
        outside = [parameter for parameter in self._model.parameters() if id(parameter) not in num_uses]
        gradients = [self._gradient_bytes(each, num_uses) for each in reversed([outside, *parameters[1:]])]
        of_head = min(measured.head_gradient_bytes, gradients[-1])
        gradients[0], gradients[-1] = of_head, gradients[-1] - of_head  # in the order of backward, the stem is last
        for name, old, nbytes in zip(measured.names, costs.stack, reversed(gradients), strict=True):
            new = f"{old}, {nbytes}" if nbytes and name is not None else old
            added_bytes = self._added_bytes(outside) if name is None else 0
            needed = costs.classes[old].working_set_bytes + added_bytes
            classes[new] = dataclasses.replace(
                costs.classes[old], gradient_bytes=float(nbytes), working_set_bytes=needed
            )
            stack.append(new)
        costs = dataclasses.replace(costs, classes=classes, stack=tuple(stack), fixed_bytes=float(self.fixed_bytes))
        return dataclasses.replace(measured, costs=costs)

    def _gradient_bytes(self, parameters: list[torch.nn.Parameter], num_uses: Counter[int]) -> int:
        """Return the bytes of the gradients that backward begins with some parameters; takes down what it began."""
        nbytes = 0
        for parameter in parameters:
            is_shared = num_uses[id(parameter)] > 1
            is_begun = self._keeps_gradients or parameter.grad is not None
            if is_shared or (self._total and num_uses[id(parameter)] >= 0 and not is_begun):
                nbytes += _bytes_of_gradient(parameter)
            if is_shared:
                num_uses[id(parameter)] = -1
        return nbytes

    def _added_bytes(self, parameters: list[torch.nn.Parameter]) -> int:
        """Return the bytes of the largest gradient that is added to one of some parameters, one after the other."""
        return max(map(_bytes_of_gradient, parameters), default=0) if self._keeps_gradients else 0

    def peak_of(self, run: Callable[[], object]) -> float:
        """Run a step and return its peak, in bytes."""
        allocator = devices.counting(self._device) if self._total else None
        if allocator is not None:
            allocator.reset_peak(self._device)
            run()
            return float(allocator.peak_bytes(self._device))
        with LiveStorages(parameters=() if self._total else self._model.parameters(), device=self._device) as live:
            run()
        return float(self.fixed_bytes + live.peak_bytes)


def _bytes_of_gradient(parameter: torch.nn.Parameter) -> int:
    """Return the bytes that backward allocates for a gradient: of a sharded parameter those of its shard."""
    if not parameter.requires_grad:
        return 0
    return sum(part.nbytes for part in plain_parts(parameter.detach()))


def _bytes_without_gradient(model: torch.nn.Module) -> int:
    return sum(_bytes_of_gradient(parameter) for parameter in model.parameters() if parameter.grad is None)


def _static_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    allocator = devices.counting(device)
    if allocator is not None:
        inflight_bytes = stores.inflight_bytes(device)  # first: asking releases what has passed
        return allocator.allocated_bytes(device) - inflight_bytes
    held: list[object] = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    if optimizer is not None:
        held += [list(state.values()) for state in optimizer.state.values()]
    storages = {id(storage): storage for storage in storages_of(held)}
    return sum(storage.nbytes() for storage in storages.values() if storage.device.type == device.type)
