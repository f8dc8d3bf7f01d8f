"""What one block costs: its values, its bytes and its seconds, measured at a call of the block in a real step.

NOTE [ Profiling a block ]

Rule 1. The call itself is recorded (NOTE [ Structure of a block ]) under a policy that recomputes everything it can, so
        that a step in which all blocks are profiled needs little more than one in which all are checkpointed.
Rule 2. The first block of each structure (operators, shapes, dtypes) then runs forward and backward a few times more,
        on its own: on detached inputs, and on aliases of its parameters, so that no gradient, no hook of a parameter
        and no other block is touched. Each of these runs finds containers and objects as a rerun does (NOTE [ Found by
        the forward ]); attributes of modules and random state are put back, and
        buffers are copies.
Rule 3. What the block holds for backward beyond the values that are known (results of opaque kernels) is one value that
        always stays.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from actckpt._blocks.key_value_caches import without_cache
from actckpt._budget.structure import BlockStructure, run_recorded
from actckpt._core.storages import storages_of
from actckpt._core.training_state import random_state, set_random_state
from actckpt._rerun.packed import held_inputs
from actckpt.errors import BlocksError
from actckpt.memory import LiveStorages
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, Value

__all__ = ["ProfiledBlock", "Profiler", "bytes_of", "first_tensor", "tensors_in"]

#: Of so many timed runs the fastest counts: whatever else the machine does can only add to it.
_NUM_TIMED = 2
#: Name of the value of Rule 3.
OTHER = "(other)"


@dataclasses.dataclass(frozen=True)
class ProfiledBlock:
    """One call of a block."""

    name: str
    costs: BlockClass
    #: Where each value is in the model, by its name in the cost table.
    places: dict[str, str]
    output_bytes: int

    def with_more(self, nbytes: int) -> ProfiledBlock:
        """Return the block with so many more bytes that always stay."""
        if nbytes <= 0:
            return self
        values = tuple(
            dataclasses.replace(value, nbytes=value.nbytes + nbytes) if value.name == OTHER else value
            for value in self.costs.values
        )
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, values=values))


class Profiler:
    """Profiles blocks as they are called, each structure once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], BlockClass] = {}

    def call(
        self,
        name: str,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, ProfiledBlock]:
        """Call a block; return its result and what it costs.

        Args:
            name: the block's qualified name.
            forward: the forward of the block.
        """
        args, kwargs = without_cache(block, forward, args, kwargs) or (args, kwargs)
        inputs = held_inputs(forward, args, kwargs, None)
        result, structure = run_recorded(forward, args, kwargs, first_tensor((args, kwargs)))
        inputs.forward_done()
        recorded = structure.values()
        places = {value.name: _without(value.name, name) for value in recorded}
        values = tuple(_renamed(value, places) for value in recorded)
        # Times differ from call to call: they make no other structure.
        key = (type(block), block.training, *(dataclasses.replace(value, recompute_s=0.0) for value in values))
        if key not in self._known:
            with inputs.as_found(checks=False), _attributes_kept(block):
                self._known[key] = _profiled(block, name, forward, (args, kwargs), values, structure)
        by_name = {short: place for place, short in places.items() if short != BLOCK_INPUT}
        return result, ProfiledBlock(name, self._known[key], by_name, bytes_of(result))


def _renamed(value: Value, names: dict[str, str]) -> Value:
    inputs = tuple(names.get(name, name) for name in value.inputs)
    return dataclasses.replace(value, name=names.get(value.name, value.name), inputs=inputs)


def _without(place: str, block: str) -> str:
    """Return a place without the block's name, so that places of equal blocks are equal."""
    if place.startswith(f"{block}."):
        return place[len(block) + 1 :]
    return place[len(block) :] if place.startswith(f"{block}::") else place


def _profiled(
    block: torch.nn.Module,
    name: str,
    forward: Callable[..., Any],
    arguments: Any,
    values: tuple[Value, ...],
    structure: BlockStructure,
) -> BlockClass:
    try:
        with _set_apart(block, arguments) as (own_args, own_kwargs):
            call = functools.partial(forward, *own_args, **own_kwargs)
            # Backward goes to these only: what else the block reads may have a graph, which is not ours.
            leaves = [t for t in (*block.parameters(), *tensors_in((own_args, own_kwargs))) if t.requires_grad]
            held_bytes, peak_bytes = _bytes(call, block, leaves)
            forward_s, backward_s = min(_seconds(call, leaves) for _ in range(_NUM_TIMED))
    except Exception as error:
        raise BlocksError(
            f"block {name!r} ran in the step, but not once more on its own, to be profiled: {type(error).__name__}: "
            f"{error}. Pass other blocks=, or a policy in place of a budget."
        ) from error
    other = max(held_bytes - structure.saved_bytes(), 0)
    return BlockClass(
        forward_s=forward_s,
        backward_s=backward_s,
        working_set_bytes=float(values[0].nbytes + peak_bytes),  # the input is the block's own
        values=(*_scaled(values, forward_s), Value(OTHER, float(other), offloadable=False, replayable=False)),
        rerun=True,
    )


def _scaled(values: tuple[Value, ...], forward_s: float) -> tuple[Value, ...]:
    """Recording makes operators slower: all of them together take no longer than the forward."""
    recorded = sum(value.recompute_s for value in values)
    factor = min(1.0, forward_s / recorded) if recorded else 1.0
    return tuple(dataclasses.replace(value, recompute_s=factor * value.recompute_s) for value in values)


@contextlib.contextmanager
def _attributes_kept(block: torch.nn.Module) -> Iterator[None]:
    """Put back the attributes of modules at the end, and what is in the lists, dicts and sets among them."""
    before = [
        (
            module,
            dict(vars(module)),
            [(value, copy.copy(value)) for value in vars(module).values() if _is_container(value)],
        )
        for module in block.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, containers in before:
            vars(module).clear()
            vars(module).update(attributes)
            for container, found in containers:
                container.clear()
                getattr(container, "extend" if isinstance(container, (list, collections.deque)) else "update")(found)


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set, collections.deque, collections.OrderedDict)


@contextlib.contextmanager
def _set_apart(block: torch.nn.Module, arguments: Any) -> Iterator[Any]:
    """Lend detached arguments, aliases of parameters and copies of buffers; put back random state at the end."""
    parameters = [
        (module, name, parameter)
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    aliases = {id(p): torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad) for _, _, p in parameters}
    buffers = [(module, name, buffer) for module in block.modules() for name, buffer in module._buffers.items()]
    before = random_state()
    try:
        for module, name, parameter in parameters:
            module._parameters[name] = aliases[id(parameter)]
        for module, name, buffer in buffers:
            module._buffers[name] = None if buffer is None else buffer.detach().clone()
        yield _detached(arguments)
    finally:
        for module, name, parameter in parameters:
            module._parameters[name] = parameter
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        set_random_state(before)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_detached(each) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_detached(each) for each in value)
    if isinstance(value, dict):
        return {key: _detached(each) for key, each in value.items()}
    return value


def _backward(roots: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> None:
    if roots and leaves:
        torch.autograd.backward(roots, gradients, inputs=leaves)


def _bytes(call: Callable[[], Any], block: torch.nn.Module, leaves: list[Tensor]) -> tuple[int, int]:
    """Return what a forward holds for backward, and the peak of forward and backward, in bytes."""
    with LiveStorages() as live:
        nodes = [tensor.grad_fn for tensor in tensors_in(call())]
    held_bytes = live.live_bytes
    del nodes
    live = LiveStorages(parameters=list(block.parameters()))
    with live:
        roots = [tensor for tensor in tensors_in(call()) if tensor.requires_grad]
    # What came out stands for its gradient, which is as large and lives as long.
    gradients = [torch.ones_like(root) for root in roots]
    with live:
        _backward(roots, gradients, leaves)
    _forget_gradients(block)
    return held_bytes, live.peak_bytes


def _seconds(call: Callable[[], Any], leaves: list[Tensor]) -> tuple[float, float]:
    start = time.perf_counter()
    roots = [tensor for tensor in tensors_in(call()) if tensor.requires_grad]
    _wait(roots)
    middle = time.perf_counter()
    _backward(roots, [torch.ones_like(root) for root in roots], leaves)
    _wait(roots)
    return middle - start, time.perf_counter() - middle


def _forget_gradients(block: torch.nn.Module) -> None:
    for parameter in block.parameters():
        parameter.grad = None


def _wait(tensors: list[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def bytes_of(value: Any) -> int:
    """Return the bytes of the storages of all tensors in a value."""
    storages = {id(storage): storage for tensor in tensors_in(value) for storage in storages_of(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor that gradients flow through, else the first one with floating-point numbers."""
    found = list(tensors_in(value))
    chosen = [tensor for tensor in found if tensor.requires_grad] or [t for t in found if t.is_floating_point()]
    return chosen[0] if chosen else None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])
