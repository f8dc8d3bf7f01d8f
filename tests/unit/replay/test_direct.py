"""Functions of torch that are called in the place of overloads: each runs that overload, with the same arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actckpt._replay import direct
from actckpt._replay.operators import operator_of


class _Seen(BaseException):
    """What a call reaches the dispatcher with."""


class _Stop(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Seen(func, args, kwargs or {})


def _reached(function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    with pytest.raises(_Seen) as seen, _Stop():
        function(*args)
    return seen.value.args


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one is other
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and (one == other or one != one)


_FORMS: dict[str, list[Any]] = {
    "Tensor": [torch.ones(2, 3), torch.tensor(2), torch.nn.Parameter(torch.ones(3)), torch.ones(2, dtype=torch.bool)],
    "Optional[Tensor]": [None, torch.ones(3)],
    "int": [0, -1, 3],
    "List[int]": [[], [0], [2, 3]],
    "number": [2, 2.5, True, 1j],
    "float": [0.5, 1.0, float("nan")],
    "bool": [True, False],
}


def _overload(name: str) -> Any:
    _, base, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, base), overload)


def _calls(name: str) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of all forms that the dispatcher may hand to a recorder, a few of each in all combinations."""
    by_position = [argument for argument in _overload(name)._schema.arguments if not argument.kwarg_only]
    required = sum(not argument.has_default_value() for argument in by_position)
    for count in range(required, len(by_position) + 1):
        forms = [_FORMS[str(argument.type)] for argument in by_position[:count]]
        if len(forms) > 4:
            forms = [some[: 1 if place > 2 else 2] for place, some in enumerate(forms)]
        yield from itertools.product(*forms)


@pytest.mark.parametrize("name", direct.FUNCTIONS)
def test_a_function_runs_the_overload_that_it_stands_for(name: str) -> None:
    operator = operator_of(_overload(name))
    calls = list(_calls(name))
    for args in calls:
        assert _is_same(_reached(operator.direct, args), _reached(operator.callee, args)), args
        assert _reached(operator.direct, args)[0] is operator.func
    assert calls


def test_only_functions_that_return_what_the_overload_returns_are_called() -> None:
    for name in direct.FUNCTIONS:
        schema = _overload(name)._schema
        assert all(str(result.type) == "Tensor" for result in schema.returns), name
        assert not any("Tensor[]" in str(argument.type) for argument in schema.arguments), name
