"""Known numbers of integer tensors in a fake step: positions, masks, and values computed from them.

Programs read integers to choose what runs: whether a mask masks anything, whether positions belong to one text. Fake
tensors have no numbers. So such programs fail, or detect tracing and take another path, which may hold more.

Numbers are known of external integers and booleans, of factory results (`arange`, `ones`), and of values made only from
known ones. The operators are recorded, and run when the numbers are read. Unknown are random numbers, uninitialised
memory, results from floating-point numbers, and tensors that an operator writes into; values made from those before
stay known. Large tensors and those with a long history are unknown, so that reading stays cheap.

Some libraries ask whether a tensor is a fake to decide whether its numbers can be read. The answer is no if they can.
torch and other libraries do not ask this, or only whether a compiler is running.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from actckpt._core import torch_private
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.storages import storages_of, tensors_in

__all__ = ["Numbers", "questions"]

_aten = torch.ops.aten
#: Maximum elements of one tensor; maximum number of operators in a row.
_MOST_NUMBERS, _MOST_STEPS = 1 << 20, 200
#: Their result is a Python number.
_READS = frozenset({_aten._local_scalar_dense, _aten.equal})
_NOT_FILLED = frozenset(
    {
        *(_aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided),
        *(_aten.new_empty, _aten.new_empty_strided),
    }
)
#: Library modules, and their function that returns whether a tensor is a fake.
_QUESTIONS = (("transformers.utils.import_utils", "is_fake_tensor"),)


class _Made:
    """How a tensor was made: one result of an operator, or an external tensor."""

    __slots__ = ("args", "at", "func", "kwargs", "steps")

    def __init__(self, func: Any, args: Any, kwargs: Any, at: int | None, steps: int) -> None:
        self.func, self.args, self.kwargs, self.at, self.steps = func, args, kwargs, at, steps


class Numbers(ObservingMode):
    """Records how integers are made inside of the `with` block, and computes their numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: Any = WeakTensorKeyDictionary()

    def note_outside(self, fake: Tensor, tensor: Tensor) -> None:
        """Record which external tensor a fake stands for."""
        if _may_be_known(fake) and not tensor.is_meta:
            self._known[fake] = _Made(None, tensor, None, None, 0)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the numbers of a tensor can be read."""
        return type(tensor) is Tensor or tensor in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is None:  # a higher-order operator
            return func(*args, **kwargs)
        inputs = list(tensors_in((args, tuple(kwargs.values()))))
        if packet in _READS and all(map(self.knows, inputs)):
            return _done(self._how(func, args, kwargs, None), {})
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._forget(inputs)
        elif all(map(self.knows, inputs)):
            self._note(packet, func, args, kwargs, result)
        return result

    def _note(self, packet: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = result if isinstance(result, (tuple, list)) else (result,)
        if packet in _NOT_FILLED or torch.Tag.nondeterministic_seeded in func.tags:
            return
        for at, tensor in enumerate(made):
            if isinstance(tensor, Tensor) and _is_fake(tensor) and _may_be_known(tensor):
                how = self._how(func, args, kwargs, None if tensor is result else at)
                if how.steps <= _MOST_STEPS:
                    self._known[tensor] = how

    def _how(self, func: Any, args: Any, kwargs: Any, at: int | None) -> _Made:
        keywords = {name: item for name, item in kwargs.items() if name != "pin_memory"}
        args, keywords = tree_map_only(Tensor, self._source, (args, keywords))
        steps = [item.steps for item in _sources((args, tuple(keywords.values())))]
        return _Made(func, args, keywords, at, 1 + max(steps, default=0))

    def _source(self, tensor: Tensor) -> _Made:
        source: _Made | None = self._known.get(tensor)
        return _Made(None, tensor, None, None, 0) if source is None else source

    def _forget(self, written: list[Tensor]) -> None:
        storages = set(map(id, storages_of(written)))
        for tensor in list(self._known):
            if id(tensor.untyped_storage()) in storages:
                del self._known[tensor]


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, torch_private.fake_tensor_type)


def _may_be_known(tensor: Tensor) -> bool:
    is_whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    is_here = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_whole and is_here and math.prod(tensor.shape) <= _MOST_NUMBERS


def _sources(value: Any) -> list[_Made]:
    if isinstance(value, _Made):
        return [value]
    return [source for item in value for source in _sources(item)] if isinstance(value, (tuple, list)) else []


def _done(made: _Made, done: dict[_Made, Any]) -> Any:
    """Return a result with its numbers, computed below all modes."""
    if made not in done:
        if made.func is None:
            done[made] = torch_private.below_modes(made.args.cpu)
        else:
            args, kwargs = tree_map_only(_Made, lambda source: _done(source, done), (made.args, made.kwargs))
            result = torch_private.below_modes(made.func, *args, **kwargs)
            done[made] = result if made.at is None else result[made.at]
    return done[made]


def questions(numbers: Numbers) -> list[tuple[Any, str, Callable[[Any], bool]]]:
    """Return modules that ask whether a tensor is a fake, their function's name, and its replacement."""

    def is_fake(value: object) -> bool:
        return isinstance(value, Tensor) and _is_fake(value) and not numbers.knows(value)

    modules = [(sys.modules.get(module), name) for module, name in _QUESTIONS]
    return [(module, name, is_fake) for module, name in modules if hasattr(module, name)]
