"""Places in the program that open regions, and what is known about each.

The site of a function that is decorated or checkpointed is that function, with the functions and modules that it was
given. Any other site is a line of the program.
"""

import functools
import hashlib
import os
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from actckpt._core import torch_private
from actckpt._core.functions import contents_of
from actckpt._core.sites import module_name
from actckpt._replay.named_operators import Matches

__all__ = ["Site", "caller_of", "site_of", "site_of_call"]

_MAX_SITES = 4096
_MAX_STRUCTURES = 64
#: Above `_MAX_STRUCTURES`, one of this many calls is audited.
_SAMPLE = 16


class Site:
    """What is known about one place in the user's code that opens regions."""

    __slots__ = (
        *(
            "audited",
            "has_other_hooks",
            "is_rerun",
            "matches",
            "modules",
            "num_calls",
            "opaque",
        ),
        *("_first", "is_reported", "structures", "warned", "where"),
    )

    def __init__(self, where: str) -> None:
        #: File and line, used as the name of a module in places where none runs.
        self.where = where
        #: Whether a report was requested, and the first tape.
        self.is_reported = False
        self._first: weakref.ref[Any] | None = None
        #: Places that came back right.
        self.audited: set[int] = set()
        #: Structures whose last result must not be replayed.
        self.opaque: set[int] = set()
        #: Final structures of calls.
        self.structures: set[int] = set()
        #: Module whose forward ran last in a structure.
        self.modules: dict[int, str | None] = {}
        self.num_calls = 0
        #: Whether hooks around the region give back other bytes than they were handed.
        self.has_other_hooks = False
        #: Texts of warnings that were shown.
        self.warned: set[Any] = set()
        #: Whether its function runs again in backward, since compiled code makes what its policy wants replayed.
        self.is_rerun = False
        #: Which operators that its policy names ran here.
        self.matches = Matches()

    def begin(self, mode: str) -> bool:
        """Count a call; returns whether it is audited at all."""
        self.num_calls += 1
        if mode == "off":
            return False
        return mode == "always" or len(self.structures) <= _MAX_STRUCTURES or self.num_calls % _SAMPLE == 0

    def asks_places(self, tape: Any) -> bool:
        """Whether reports are to have places: of the first step, and of all once one was asked for."""
        if self._first is None:
            self._first = weakref.ref(tape)
        return self.is_reported or self._first() is not None

    def end(self, structure: int) -> None:
        """Note the structure of a call that is over."""
        if len(self.structures) <= _MAX_STRUCTURES:
            self.structures.add(structure)
        if len(self.modules) > _MAX_STRUCTURES * 4096:  # programs whose shapes never repeat
            self.modules.clear()
            self.audited.clear()

    def module(self, structure: int) -> str | None:
        """Return the module whose forward is running; looks at the stack once per structure."""
        found = self.modules.get(structure, "")
        if found == "":
            found = self.modules[structure] = module_name()
        return found


_lock = threading.Lock()
_by_code: OrderedDict[Any, Site] = OrderedDict()
#: Keys of code, by where it begins, of the last code that began there: to digest one takes as long as an operator.
_by_line: dict[tuple[str, int, str], tuple[types.CodeType, tuple[Any, ...]]] = {}
_by_object: weakref.WeakKeyDictionary[Any, Site] = weakref.WeakKeyDictionary()


@torch_private.untraced
def site_of(caller: Any) -> Site:
    """Return the site of a (code, line) or longer, or of a result of `caller_of`."""
    if isinstance(caller, torch.nn.Module):
        with _lock:
            return _by_object.setdefault(caller, Site(type(caller).__name__))
    key = tuple([_code_key(part) if isinstance(part, types.CodeType) else part for part in caller])
    site = _by_code.get(key)
    if site is not None:
        return site
    with _lock:
        site = _by_code.setdefault(key, Site(_where(caller)))
        if len(_by_code) > _MAX_SITES:
            _by_code.popitem(last=False)
        return site


class _Method(NamedTuple):
    """The site of a method that was called with nothing that tells calls apart."""

    owner: weakref.ref[Any]
    code: types.CodeType
    defaults: tuple[Any, ...] | None
    site: Site


#: By id() of the owner, of the method of it that was called last: to name a caller takes as long as some operators.
_by_owner: dict[int, _Method] = {}


def site_of_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Site:
    """Return the site of a call of `function`: `site_of(caller_of(...))`, remembered for methods of modules."""
    if type(function) is not types.MethodType or type(function.__func__) is not types.FunctionType:
        return site_of(caller_of(function, args, kwargs))
    if _tells_apart((*args, *kwargs.values()) if kwargs else args):
        return site_of(caller_of(function, args, kwargs))
    owner, called = function.__self__, function.__func__
    known = _by_owner.get(id(owner))
    if (
        known is not None
        and known.owner() is owner
        and known.code is called.__code__
        and _has_defaults(called, known.defaults)
    ):
        return known.site
    site = site_of(caller_of(function, args, kwargs))
    is_told = _has_defaults(called, called.__defaults__) and not _tells_apart(called.__defaults__ or ())
    if is_told and isinstance(owner, torch.nn.Module):
        reference = weakref.ref(owner, functools.partial(_forget, id(owner)))
        _by_owner[id(owner)] = _Method(reference, called.__code__, called.__defaults__, site)
    return site


def _tells_apart(values: tuple[Any, ...]) -> bool:
    """Whether an argument can distinguish calls, now or after a list or a closure in it has changed."""
    return any(callable(value) or isinstance(value, (list, tuple)) for value in values)


def _has_defaults(function: types.FunctionType, defaults: tuple[Any, ...] | None) -> bool:
    """Whether a function has these defaults, and nothing else but its code."""
    return function.__defaults__ is defaults and not function.__closure__ and not function.__kwdefaults__


def _forget(number: int, reference: weakref.ref[Any]) -> None:
    known = _by_owner.get(number)
    if known is not None and known.owner is reference:
        del _by_owner[number]


def _code_key(code: types.CodeType) -> tuple[Any, ...]:
    """Return a key of code that is the same in every process: file, first line, name and a digest of its contents."""
    begin = code.co_filename, code.co_firstlineno, code.co_name
    known = _by_line.get(begin)
    if known is not None and known[0] is code:
        return known[1]
    if len(_by_line) >= _MAX_SITES:
        _by_line.clear()
    key = *begin, hashlib.blake2b(_contents(code).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    _by_line[begin] = code, key
    return key


def _contents(value: Any) -> str:
    """Return a text of a constant of code, without addresses and in no order that a hash gives."""
    if isinstance(value, types.CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        return f"{value.co_name}{value.co_firstlineno}{value.co_code!r}{names}{_contents(value.co_consts)}"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_contents, value)))}}}"
    return f"({', '.join(map(_contents, value))})" if isinstance(value, tuple) else repr(value)


def _where(caller: tuple[Any, ...]) -> str:
    """Return file and line of the code of a caller, or what else tells where it is."""
    for part, after in zip(caller, (*caller[1:], None), strict=True):
        if isinstance(part, types.CodeType):
            return f"{os.path.basename(part.co_filename)}:{after if type(after) is int else part.co_firstlineno}"
    return str(caller[0].kind if isinstance(caller[0], _Itself) else caller[0].__name__) if caller else "region"


class _Itself:
    """An object in the name of a caller: equal to itself only, and not kept alive."""

    __slots__ = ("_id", "_reference", "kind")

    def __init__(self, item: Any) -> None:
        self._id = id(item)
        self.kind = type(item).__name__
        self._reference = weakref.ref(item)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and self._reference() is other._reference() is not None


def caller_of(function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Return what tells a call of `function` from calls of others, the same at each call.

    A function goes by its code, since it may be made anew at each call; what it calls and was given (in its closure,
    its defaults, its arguments, arguments of `partial`) tells functions of the same code apart. Modules and other
    objects go by themselves.
    """
    found: list[Any] = []
    seen: set[int] = set()
    for value in (function, *args, *(kwargs or {}).values()):
        _note_callables(value, found, seen)
    return function if isinstance(function, torch.nn.Module) and len(found) == 1 else tuple(found)


def _note_callables(value: Any, found: list[Any], seen: set[int]) -> None:
    if isinstance(value, (list, tuple)):
        if value and callable(value[0]):
            for item in value:
                _note_callables(item, found, seen)
        return
    if not callable(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__]
        found.append(_itself(value.__self__))
    elif isinstance(value, types.FunctionType):
        parts = [*map(contents_of, value.__closure__ or ()), *(value.__defaults__ or ())]
        parts.extend((value.__kwdefaults__ or {}).values())
        found.append(value.__code__)
    else:
        parts = []
        found.append(_itself(value))
    for part in parts:
        _note_callables(part, found, seen)


def _itself(item: Any) -> Any:
    try:
        return _Itself(item)
    except TypeError:  # takes no weak references
        return type(item)
