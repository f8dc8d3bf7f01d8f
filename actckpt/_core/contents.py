"""What Python objects lead to: the tensors and generators in them, and what their containers hold, to be put back."""

import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actckpt._core.functions import contents_of

__all__ = ["Contents"]

#: Objects are looked at up to so many: one may lead to a whole program.
_MOST = 10_000
#: Packages whose objects keep what they have to themselves.
_LEFT_ALONE = (sys.stdlib_module_names - {"argparse", "collections", "types"}) | {"torch"}
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Contents:
    """What containers and attributes hold that some objects lead to; modules are left out, and what has a lock."""

    def __init__(self, *roots: Any) -> None:
        self.tensors: list[Tensor] = []
        self.generators: list[torch.Generator] = []
        #: Containers with a copy of what they hold.
        self._found: list[tuple[Any, Any]] = []
        left, seen = deque(roots), dict[int, Any]()
        while left and len(seen) < _MOST:
            value = left.popleft()
            if id(value) not in seen and not isinstance(value, (str, bytes, int, float, type, types.ModuleType)):
                seen[id(value)] = value
                left.extend(self._parts(value))

    def put_back(self) -> None:
        """Let each container hold again what it held."""
        for container, before in self._found:
            if isinstance(container, dict):
                _put_dict(container, before)
            elif isinstance(container, list):
                list.__setitem__(container, slice(None), before)
            elif isinstance(container, set):
                set.clear(container)
                set.update(container, before)
            else:
                deque.clear(container)
                deque.extend(container, before)

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, types.FunctionType):
            yield from map(contents_of, value.__closure__ or ())
            yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            yield value.__self__
        elif isinstance(value, partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        elif not isinstance(value, torch.nn.Module):
            yield from self._held(value)

    def _held(self, value: Any) -> Iterator[Any]:
        if isinstance(value, (list, set, deque, dict)):
            held = _copy(value)
            self._found.append((value, held))
            yield from held.values() if isinstance(held, dict) else held
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and _is_noted(type(value), attributes):
            yield attributes


def _is_noted(kind: type, attributes: dict[str, Any]) -> bool:
    has_lock = any(isinstance(attribute, _LOCKS) for attribute in attributes.values())
    return not has_lock and kind.__module__.partition(".")[0] not in _LEFT_ALONE


def _copy(value: Any) -> Any:
    """Return what a container holds, whatever a subclass of its type makes of that."""
    if isinstance(value, dict):
        return dict(_dict_type(value).items(value))
    kind: Any = next(kind for kind in (list, set, deque) if isinstance(value, kind))
    return list(kind.__iter__(value))


def _put_dict(container: dict[Any, Any], before: dict[Any, Any]) -> None:
    kind = _dict_type(container)
    now = list(kind.items(container))
    if len(now) == len(before) and all(a is b and x is y for (a, x), (b, y) in zip(now, before.items(), strict=True)):
        return
    kind.clear(container)
    for key, value in before.items():
        kind.__setitem__(container, key, value)


def _dict_type(container: dict[Any, Any]) -> Any:
    return OrderedDict if isinstance(container, OrderedDict) else dict
