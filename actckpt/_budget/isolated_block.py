"""Isolation of a block from its model: it may run again without side effects (see `profiling`)."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._blocks.arguments import first_tensor
from actckpt._core import torch_private
from actckpt._core.reachable import Contents, Reached, reachable
from actckpt._core.storages import storages_of, tensors_in
from actckpt._core.training_state import random_state, set_random_state

__all__ = [
    *("LEAF", "attributes_of", "counts_calls", "holds_input", "isolate", "nodes_behind", "with_trained_input"),
]

#: Attributes of every module; `forward` or the compiled call is replaced by the block's region.
_NOT_ITS_OWN = {*vars(torch.nn.Module()), "forward", torch_private.COMPILED_CALL}
_Written = dict[int, torch.UntypedStorage]
#: Name of the nodes of leaves.
LEAF = "torch::autograd::AccumulateGrad"


def attributes_of(block: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of a block and its modules, without those that every module has."""
    return [
        {key: value for key, value in vars(module).items() if key not in _NOT_ITS_OWN} for module in block.modules()
    ]


def counts_calls(block: torch.nn.Module, before: list[dict[str, Any]], written: _Written) -> bool:
    """Return whether another call would change attributes again, as this one did.

    Losses do not count, nor do generators that reruns restore; generators inside objects do.
    """
    restored = set(map(id, _C.Parameters(block).generators))
    for previous, now in zip(before, attributes_of(block), strict=False):
        for key, value in now.items():
            if any(id(generator) not in restored for generator in _generators_in([value])):
                return True
            if isinstance(value, Tensor) and any(id(storage) in written for storage in storages_of(value)):
                return True
            is_loss = isinstance(value, Tensor) and value.requires_grad
            if previous.get(key) is not value and not is_loss:
                return True
    return False


@contextlib.contextmanager
def isolate(
    block: torch.nn.Module, arguments: Any, written: _Written, drawn: Iterable[torch.Generator]
) -> Iterator[tuple[Any, list[Tensor]]]:
    """Give one run of a block its own arguments, parameters and buffers, and restore what it changes.

    Args:
        arguments: tensors in tuples, lists, dicts and dataclasses.
        written: storages that it writes to in place.
        drawn: generators passed to its operators.
    Yields:
        The arguments, detached, and the leaves among these and the parameters.
    """
    modules = list(block.modules())
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    own = [value for _, found in attributes for key, value in found.items() if key not in _NOT_ITS_OWN]
    hooks = [hook for m in modules for found in (m._forward_pre_hooks, m._forward_hooks) for hook in found.values()]
    # Hooks that collect module outputs store them in closures and context variables.
    roots = (arguments, *own, *hooks, *contextvars.copy_context().values())
    contents = Contents.of(reachable(Reached("", root) for root in roots))
    tensors = [(entries, dict(entries)) for module in modules for entries in (module._parameters, module._buffers)]
    bits = [(storage, storage.clone()) for storage in written.values()]
    lent = _Lent(written)
    before = random_state()
    generators = [(generator, generator.get_state()) for generator in {*_generators_in(own), *drawn}]
    try:
        for module in modules:
            lent.replace_in(module)
        casts = _without_cached_casts() if torch_private.any_autocast_enabled() else contextlib.nullcontext()
        with _without_outer_hooks(), casts:
            yield _with_tensors(arguments, lent.lend), lent.leaves
    finally:
        contents.restore()
        for now, found in [*attributes, *tensors]:
            _put_back(now, found)
        for storage, found_bits in bits:
            storage.copy_(found_bits)
        set_random_state(before)
        for generator, state in generators:
            generator.set_state(state)


def _generators_in(values: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators among values, in containers and in object attributes."""
    found = (reached.value for reached in reachable(Reached("", value) for value in values))
    return [value for value in found if isinstance(value, torch.Generator)]


def _without_outer_hooks() -> contextlib.AbstractContextManager[object]:
    """Keep saved tensors from outer hooks: a region or an `offload` block that the model runs in."""
    if torch_private.outer_hooks() is None:
        return contextlib.nullcontext()
    # Detached: if the tensor is a result, holding it directly would hold its graph.
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Keep casts of the replacements out of autocast's cache, which would hold them until autocast ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _put_back(now: dict[str, Any], previous: dict[str, Any]) -> None:
    for key in [key for key in now if key not in previous]:
        del now[key]
    for key, value in previous.items():
        if key not in now or now[key] is not value:
            now[key] = value


def _has_bytes(tensor: Tensor) -> bool:
    """Whether a tensor's storage was not freed (`resize_(0)`)."""
    return not tensor.numel() or all(storage.nbytes() > 0 for storage in storages_of(tensor))


class _Lent:
    """The replacements for tensors of the model."""

    def __init__(self, written: _Written) -> None:
        self._written = written
        self._known: dict[int, tuple[Tensor, Any]] = {}  # with the original, so that its id stays unique
        self.leaves: list[Tensor] = []

    def replace_in(self, module: torch.nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = self._for(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = self._for(buffer, copied=True)
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and self._is_written(value):
                vars(module)[name] = self._for(value)

    def lend(self, tensor: Tensor) -> Any:
        return self._for(tensor)

    def _for(self, tensor: Tensor, *, copied: bool = False) -> Any:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = (tensor, self._made(tensor, copied or self._is_written(tensor)))
        return self._known[id(tensor)][1]

    def _made(self, tensor: Tensor, copied: bool) -> Tensor:
        own = tensor.detach().clone() if copied and _has_bytes(tensor) else tensor.detach()
        if isinstance(tensor, torch.nn.Parameter):
            own = torch.nn.Parameter(own, requires_grad=tensor.requires_grad)
            # Libraries attach objects to parameters, such as a buffer that gradients are added to.
            noted = {
                key: value.detach().clone() if isinstance(value, Tensor) and _has_bytes(value) else value
                for key, value in vars(tensor).items()
            }
            vars(own).update(noted)
        elif tensor.requires_grad:
            own.requires_grad_()
        if own.requires_grad:
            self.leaves.append(own)
            if copied and not isinstance(tensor, torch.nn.Parameter):
                return own.clone()  # a leaf cannot be written to in place
        return own

    def _is_written(self, tensor: Tensor) -> bool:
        return any(id(storage) in self._written for storage in storages_of(tensor))


def _with_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(own, field.name, _with_tensors(getattr(value, field.name), change))
        return own
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_with_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_with_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, change) for key, item in value.items()}
    return value


def holds_input(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether anything holds a forward's input after it has run: autograd, a context, an attribute.

    The input requires grad, as it does in most calls of a block, though not in a model's first one. An input with inner
    tensors counts as held, since some of these may be held alone.

    Args:
        args, kwargs: of an isolated run. Their first tensor is copied: whoever made it holds it, too.
    """
    argument = first_tensor((args, kwargs))
    if argument is None or hasattr(argument, "__tensor_flatten__"):
        return True
    arguments, storage = _with_copy_of(argument, (args, kwargs))
    nodes = [tensor.grad_fn for tensor in tensors_in(forward(*arguments[0], **arguments[1]))]
    del arguments
    is_held = storage() is not None
    del nodes
    return is_held


def with_trained_input(arguments: Any, result: Any) -> Any:
    """Return arguments with an input that needs a gradient, if none does and the block returns a tensor like the input.

    In a stack of such blocks, only the input of the first one needs none.
    """
    argument, output = first_tensor(arguments), first_tensor(result)
    if argument is None or output is None or any(tensor.requires_grad for tensor in tensors_in(arguments)):
        return arguments
    if not output.requires_grad or argument.shape != output.shape or argument.dtype != output.dtype:
        return arguments
    alias = argument.detach().requires_grad_()
    return _with_tensors(arguments, lambda other: alias if other is argument else other)


def nodes_behind(result: Any) -> Counter[str]:
    """Return how many nodes of each name are in the graph of a block's result."""
    left = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    seen = set(left)
    while left:
        new = {node for node, _ in left.pop().next_functions if node is not None and node not in seen}
        seen |= new
        left += new
    return Counter(node.name() for node in seen)


def _with_copy_of(tensor: Tensor, value: Any) -> tuple[Any, weakref.ref[torch.UntypedStorage]]:
    """Return a value with a copy of one of its tensors (no leaf: the graph would hold it), and the storage."""
    own = tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()).clone()
    return _with_tensors(value, lambda other: own if other is tensor else other), weakref.ref(own.untyped_storage())
