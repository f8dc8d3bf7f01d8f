"""Objects that are reachable from a call: through containers, functions, and attributes of objects."""

from __future__ import annotations

import operator
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from actckpt._core.functions import contents_of, global_names

__all__ = ["Contents", "Reached", "is_container", "reachable"]

_PLAIN = {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type}
_LEAVES = (torch.Tensor, torch.Generator, torch.nn.Module)
#: Maximum number of values looked at in objects and global variables: one may lead to a whole program.
_MAX_IN_OBJECTS = 1000
#: Packages whose objects and globals are theirs. The exceptions hold what programs put there.
_PRIVATE = (sys.stdlib_module_names | {"torch"}) - {"argparse", "collections", "types"}


class Reached(NamedTuple):
    """A value, and where it was found."""

    place: str
    value: Any
    #: Whether it was found in an object or a global variable, not in the arguments or the closure.
    is_outside: bool = False
    #: Whether it is the value of a global variable.
    is_global: bool = False


def reachable(roots: Iterable[Reached], excluded: Iterable[Any] = ()) -> Iterator[Reached]:
    """Yield each object that is reachable once, the nearest first. Tensors and modules are not looked into.

    Args:
        roots: function and arguments of a call.
        excluded: objects that are not yielded, nor is what only they lead to.
    """
    excluded = list(excluded)
    seen, waiting, num_left = set(map(id, excluded)), deque(roots), _MAX_IN_OBJECTS
    while waiting:
        reached = waiting.popleft()
        value, kind = reached.value, type(reached.value)
        if kind in _PLAIN or id(value) in seen or issubclass(kind, type):
            continue
        if reached.is_outside:
            num_left -= 1
            if num_left < 0:
                continue
        seen.add(id(value))
        yield reached
        if not issubclass(kind, _LEAVES) and not (reached.is_outside and num_left <= 0):
            waiting.extend(_parts(reached))


def _parts(reached: Reached) -> Iterator[Reached]:
    place, value, is_outside, _ = reached
    kind = type(value)
    if kind is types.FunctionType:
        yield from _parts_of_function(value, is_outside=is_outside)
    elif kind is types.MethodType:
        yield Reached(place, value.__func__, is_outside)
        yield Reached(place, value.__self__, is_outside)
    elif issubclass(kind, partial):
        yield Reached(place, value.func, is_outside)
        yield Reached(f"{place}, arguments of partial", value.args, is_outside)
        yield Reached(f"{place}, keywords of partial", value.keywords, is_outside)
    elif kind is weakref.ReferenceType:
        if isinstance(referent := value(), torch.nn.Module):
            yield Reached(place, referent, is_outside)
    elif issubclass(kind, dict):
        items = _some(_base(value).items(value), is_outside=is_outside)
        yield from (Reached(f"{place}[{_shown(key)}]", part, is_outside) for key, part in items if _leads_on(part))
    elif issubclass(kind, (tuple, list, deque, set, frozenset)):
        parts = _some(_base(value).__iter__(value), is_outside=is_outside)
        yield from (Reached(f"{place}[{i}]", part, is_outside) for i, part in enumerate(parts) if _leads_on(part))
    elif any("__dataclass_fields__" in vars(each) for each in kind.__mro__):
        for name, part in _attributes(value).items():
            yield Reached(f"{place}.{name}", part, is_outside)
    elif _has_attributes_of_the_program(kind):
        for name, part in _attributes(value).items():
            yield Reached(f"{place}.{name}", part, is_outside=True)


def _some(parts: Iterable[Any], *, is_outside: bool) -> Iterator[Any]:
    return islice(parts, _MAX_IN_OBJECTS if is_outside else None)


def _leads_on(part: Any) -> bool:
    return type(part) not in _PLAIN


def _shown(key: Any) -> str:
    """Return a key as text; of objects only their type, whose own text may be anything."""
    return repr(key) if type(key) in _PLAIN else f"a {type(key).__name__}"


def _parts_of_function(function: types.FunctionType, *, is_outside: bool) -> Iterator[Reached]:
    name, code = function.__name__, function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Reached(f"Variable {variable!r} in the closure of {name}", contents_of(cell), is_outside)
    for defaults in (function.__defaults__, function.__kwdefaults__):
        yield Reached(f"The defaults of {name}", defaults, is_outside)
    if function.__dict__:
        yield Reached(f"The attributes of {name}", function.__dict__, is_outside=True)
    variables = function.__globals__
    if _package(variables.get("__name__")) in _PRIVATE:
        return
    for variable in global_names(code):
        value = variables.get(variable)
        is_elsewhere = type(value) is types.FunctionType and value.__globals__ is not variables
        if not issubclass(type(value), types.ModuleType) and not is_elsewhere:
            yield Reached(f"Global variable {variable!r} that {name} reads", value, is_outside=True, is_global=True)


def _package(module: object) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


#: Py_TPFLAGS_HEAPTYPE: the type was made by a class statement.
_HEAP_TYPE = 1 << 9
_of_the_program: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _has_attributes_of_the_program(kind: type) -> bool:
    known = _of_the_program.get(kind)
    if known is None:
        kinds = [each for each in kind.__mro__ if each.__flags__ & _HEAP_TYPE]
        packages = [_package(each.__module__) for each in kinds]
        is_own = kind in kinds and packages[0] not in _PRIVATE and "torch" not in packages
        known = _of_the_program[kind] = is_own or kind is types.SimpleNamespace
    return known


def _dict_of(value: Any) -> dict[str, Any]:
    """Return the dict of an object, whatever its class makes of `__dict__`."""
    if type(value) is types.FunctionType:
        return value.__dict__
    for each in type(value).__mro__:
        descriptor = vars(each).get("__dict__")
        if type(descriptor) is types.GetSetDescriptorType:
            found: dict[str, Any] = descriptor.__get__(value)
            return found
    return {}


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself holds, without asking its class."""
    found = dict(_dict_of(value)) if type(value).__dictoffset__ else {}
    return found | {slot.__name__: held for slot, held in _slots_of(value) if held is not _EMPTY}


_EMPTY = object()


def _slots_of(value: Any) -> list[tuple[types.MemberDescriptorType, Any]]:
    """Return the slots of an object and what they hold, `_EMPTY` for nothing."""
    slots = [each for kind in type(value).__mro__ for each in vars(kind).values()]
    return [(slot, _in_slot(slot, value)) for slot in slots if type(slot) is types.MemberDescriptorType]


def _in_slot(slot: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _EMPTY


class Contents:
    """What containers, and the attributes of objects, held at one moment.

    Args:
        containers: lists, dicts, sets, deques and subclasses of these.
    """

    def __init__(self, containers: Iterable[Any]) -> None:
        #: Containers, and copies of them.
        self._held = [(container, _copy(container)) for container in containers]
        #: Slots of objects: object, slot, and what it held.
        self._slots: list[tuple[Any, types.MemberDescriptorType, Any]] = []

    @classmethod
    def of(cls, found: Iterable[Reached]) -> Contents:
        """Return the contents of containers, and of attributes and slots of objects."""
        containers, slots = [], []
        for _, value, *_ in found:
            kind = type(value)
            if issubclass(kind, _CONTAINERS):
                containers.append(value)
            elif kind is types.FunctionType or _has_attributes_of_the_program(kind):
                if any(isinstance(each, _LOCKS) for each in _attributes(value).values()):
                    continue  # other threads use it
                if kind.__dictoffset__:
                    containers.append(_dict_of(value))
                if kind is not types.FunctionType:
                    slots += [(value, slot, held) for slot, held in _slots_of(value)]
        contents = cls(containers)
        contents._slots = slots
        return contents

    def replace_displaced(self, replaced: Callable[[Any], Any]) -> None:
        """Hold other objects in the place of those that a container does not hold any more.

        Args:
            replaced: returns the object to hold.
        """
        for container, held in self._held:
            if _is_same(container, held):
                continue
            there = set(map(id, _values(container)))
            instead = [value if id(value) in there else replaced(value) for value in _values(held)]
            if isinstance(held, dict):
                held.update(zip(held, instead, strict=True))
            else:
                _put(held, instead)

    @property
    def is_empty(self) -> bool:
        """Whether there are no containers."""
        return not self._held

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the body with what the containers held, then put back what they hold now."""
        outside = [_copy(container) for container, _ in self._held]
        try:
            for container, held in self._held:
                _put(container, held)
            yield
        finally:
            for (container, _), now in zip(self._held, outside, strict=True):
                _put(container, now)

    def restore(self) -> None:
        """Put back what they held."""
        for container, held in self._held:
            _put(container, held)
        for value, slot, before in self._slots:
            if _in_slot(slot, value) is before:
                continue
            if before is _EMPTY:
                slot.__delete__(value)
            else:
                slot.__set__(value, before)


_CONTAINERS = (list, dict, set, deque)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def is_container(value: Any) -> bool:
    """Whether a value is a container that can be changed."""
    return issubclass(type(value), _CONTAINERS)  # without asking a proxy for its class


def _values(container: Any) -> list[Any]:
    base = _base(container)
    return list(base.values(container) if issubclass(base, dict) else base.__iter__(container))


def _copy(container: Any) -> Any:
    """Return a copy of the base type, whatever a subclass overrides."""
    base = _base(container)
    if issubclass(base, dict):
        return base(base.items(container))
    return deque(deque.__iter__(container), container.maxlen) if base is deque else base(base.__iter__(container))


def _put(container: Any, held: Any) -> None:
    if not _is_same(container, held):
        base, held = _base(container), _copy(held)
        if not (issubclass(base, dict) and _has_keys_of(container, held)):  # attributes stay readable meanwhile
            base.clear(container)
        base.extend(container, held) if base in (list, deque) else base.update(container, held)


def _base(container: Any) -> Any:
    return next(
        base for base in (OrderedDict, dict, list, tuple, set, frozenset, deque) if issubclass(type(container), base)
    )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects, in the same order if they have one."""
    values = [_values(each) for each in (one, other)]
    if len(values[0]) != len(values[1]):
        return False
    if isinstance(one, set):
        return set(map(id, values[0])) == set(map(id, values[1]))
    if isinstance(one, dict) and not _has_keys_of(one, other):
        return False
    return all(map(operator.is_, *values))


def _has_keys_of(one: Any, other: Any) -> bool:
    """Whether two dicts have the same keys, in the same order."""
    keys = [list(_base(each).__iter__(each)) for each in (one, other)]
    return len(keys[0]) == len(keys[1]) and all(map(operator.is_, *keys))
