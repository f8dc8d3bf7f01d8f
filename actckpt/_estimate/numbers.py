"""Integers of a step whose numbers are known although its tensors have none: positions, masks, and what comes of them.

NOTE [ Numbers ]

Programs look at integers to choose what runs: whether a mask masks anything, whether positions are those of one text.
On the device they read them; tensors without bytes have none, so that such programs fail, or ask whether they are
traced and take another path, which may hold more.

Rule 1. Known are integers and booleans that come from outside, those that factories make of no tensor (`arange`,
        `ones`), and what operators make of known ones alone. How they are made is noted, and done where they are read.
Rule 2. Unknown are random ones, memory that is not filled, what comes of floating-point numbers, and what an operator
        writes into. What was made of it before stays known.
Rule 3. What is large or took many operators is unknown, so that reading costs little.
Rule 4. Libraries that ask whether a tensor is a fake, to know whether its numbers can be read, hear that it is none
        where they can. Torch and other libraries ask nothing of the kind, or only whether a compiler runs.
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
#: Of one tensor, in numbers; of operators after another.
_MOST_NUMBERS, _MOST_STEPS = 1 << 20, 200
#: They return what is not in their result: numbers.
_READS = frozenset({_aten._local_scalar_dense, _aten.equal})
_NOT_FILLED = frozenset(
    {
        *(_aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided),
        *(_aten.new_empty, _aten.new_empty_strided),
    }
)
#: Modules of libraries, and their function that says whether a tensor is a fake.
_QUESTIONS = (("transformers.utils.import_utils", "is_fake_tensor"),)


class _Made:
    """How a tensor was made: one result of an operator, or a tensor from outside."""

    __slots__ = ("args", "at", "func", "kwargs", "steps")

    def __init__(self, func: Any, args: Any, kwargs: Any, at: int | None, steps: int) -> None:
        self.func, self.args, self.kwargs, self.at, self.steps = func, args, kwargs, at, steps


class Numbers(ObservingMode):
    """Remembers how integers are made inside of the `with` block, and reads them: NOTE [ Numbers ]."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: Any = WeakTensorKeyDictionary()

    def note_outside(self, fake: Tensor, tensor: Tensor) -> None:
        """Note for which tensor from outside a fake stands."""
        if _may_be_known(fake) and not tensor.is_meta:
            self._known[fake] = _Made(None, tensor, None, None, 0)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the numbers of a tensor can be read."""
        return type(tensor) is Tensor or tensor in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is None:  # of a higher order
            return func(*args, **kwargs)
        given = list(tensors_in((args, tuple(kwargs.values()))))
        if packet in _READS and all(map(self.knows, given)):
            return _done(self._how(func, args, kwargs, None), {})
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._forget(given)
        elif all(map(self.knows, given)):
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
        given = {name: each for name, each in kwargs.items() if name != "pin_memory"}
        args, given = tree_map_only(Tensor, self._source, (args, given))
        steps = [each.steps for each in _sources((args, tuple(given.values())))]
        return _Made(func, args, given, at, 1 + max(steps, default=0))

    def _source(self, tensor: Tensor) -> _Made:
        found: _Made | None = self._known.get(tensor)
        return _Made(None, tensor, None, None, 0) if found is None else found

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
    return [found for each in value for found in _sources(each)] if isinstance(value, (tuple, list)) else []


def _done(made: _Made, done: dict[_Made, Any]) -> Any:
    """Return a result with its numbers. No mode sees it being made."""
    if made not in done:
        if made.func is None:
            done[made] = torch_private.below_modes(made.args.cpu)
        else:
            args, kwargs = tree_map_only(_Made, lambda each: _done(each, done), (made.args, made.kwargs))
            result = torch_private.below_modes(made.func, *args, **kwargs)
            done[made] = result if made.at is None else result[made.at]
    return done[made]


def questions(numbers: Numbers) -> list[tuple[Any, str, Callable[[Any], bool]]]:
    """Return modules that ask whether a tensor is a fake, the name of their function, and what answers in its place."""

    def is_fake(value: object) -> bool:
        return isinstance(value, Tensor) and _is_fake(value) and not numbers.knows(value)

    modules = [(sys.modules.get(module), name) for module, name in _QUESTIONS]
    return [(module, name, is_fake) for module, name in modules if hasattr(module, name)]
