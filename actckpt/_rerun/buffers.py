"""Buffers that a forward reads and changes, restored for reruns.

NOTE [ Buffers ]

A module may read a buffer and change it in the same forward: the vectors of `spectral_norm`, moving averages,
quantization observers. A rerun that reads the changed buffer computes something else, and nothing shows it.

Rule 1. A rerun sees copies of the buffers that the forward saw. They replace the buffers while it runs, and are dropped
then. So a rerun changes no buffer, and BatchNorm updates its running statistics once.
Rule 2. The copies must be made before the forward. A module's first call, in training and in evaluation, runs under a
mode that copies a buffer before the first operator that writes to it. A module that changed a buffer is remembered: its
buffers are copied before each forward. The copies are held if versions show another change, or always if versions
missed the first one (a write through `.data`). All other modules cost a version check. Unwatched calls, such as those
of budget profiling, do not count as first calls; only versions show their writes. A region may refer to modules that it
does not call. They are watched until an operator uses one of their buffers, or until some rerun has happened since (the
step is over, and they were idle).
Rule 3. A rerun must not read a changed buffer without a copy; it raises if it does. Its module changed it for the first
time in a later call, or someone else changed it after the forward.
Rule 4. A forward pre-hook may set a tensor as a plain attribute (the weight of the older `spectral_norm`,
`weight_norm`, pruning). If the hook does not run again in the rerun, the rerun sees the tensor of its forward.

BatchNorm in training updates its statistics without reading them, and without a version change. They are not copied
before the forward. A rerun gets copies of the current ones if the batch counter shows that the module ran. This holds
only for classes whose code is known: a subclass may read its statistics.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from actckpt import _C
from actckpt._C import memory_of, storage_of
from actckpt._core import messages
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.tensor_changes import version_of

__all__ = ["Buffers", "Stale", "note_buffers", "tensors_in", "written_tensors"]

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
#: timm classes that do the same, by name: timm need not be installed.
_TIMM_BATCH_NORMS = ("BatchNormAct2d", "SyncBatchNormAct")

# Flags of a module: called in training, called in evaluation, changes its buffers, changes them without a version
# change.
_CALLED = {True: 1, False: 2}
_CHANGES = 4
_HIDES = 8
_known: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
#: By training mode: the number of reruns when a module was first watched.
_first_watched: dict[bool, WeakKeyDictionary[torch.nn.Module, int]] = {
    True: WeakKeyDictionary(),
    False: WeakKeyDictionary(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Stale:
    """A tensor that changed since the forward read it, without a copy."""

    tensor: Tensor
    #: Its version when the forward started.
    version: int
    place: str
    advice: str


class _Noted:
    """The buffers of one module."""

    __slots__ = ("_batches", "copies", "found", "has_run", "is_known", "is_statistics", "module", "versions", "written")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.is_statistics = module.training and _is_batch_norm(type(module)) and module.running_mean is not None
        self.found = {} if self.is_statistics else dict(module._buffers)
        self.versions = {name: (version_of(buffer), memory_of(buffer)) for name, buffer in self.found.items()}
        known = _known.get(module, 0)
        if any(buffer is not None and buffer.is_inference() for buffer in self.found.values()):
            known = _known[module] = known | _CHANGES | _HIDES  # they have no version
        # If it changed them unwatched, it is unknown whether versions always show that.
        self.is_known = self.is_statistics or bool(known & (_CALLED[bool(module.training)] | _HIDES))
        self.copies = _copies(self.found) if known & _CHANGES else None
        #: Names of the buffers that the mode saw written.
        self.written: set[str] = set()
        #: Whether a watched operator used one of them; of statistics, whether they may have moved (None: not over).
        self.has_run: bool | None = None if self.is_statistics else False
        self._batches = _batches(module) if self.is_statistics else None

    def note_write(self, name: str) -> None:
        if self.copies is None:
            self.copies = _copies(self.found)
        self.written.add(name)

    def forward_done(self, *, was_watched: bool) -> None:
        if self.is_statistics:
            self.has_run = self._statistics_moved()
            return
        known = _known.get(self.module, 0) | (_CALLED[bool(self.module.training)] if self._is_seen(was_watched) else 0)
        moved = set(self._moved())
        if not self.written <= moved:
            known |= _HIDES
        if moved or self.written or not self._stands():
            known |= _CHANGES
            if not moved and self.copies is None:  # replaced: the graph of the new ones may own an earlier region
                self.copies = self.found = {name: _C.without_graph(buffer) for name, buffer in self.found.items()}
        elif not known & _HIDES:
            self.copies = None
        _known[self.module] = known

    def _is_seen(self, was_watched: bool) -> bool:
        if self.is_known or not was_watched:
            return was_watched
        now = _C.num_reruns()
        first = _first_watched[bool(self.module.training)].setdefault(self.module, now)
        return bool(self.has_run) or first != now

    def _moved(self) -> list[str]:
        return [
            name
            for name, (before, memory) in self.versions.items()
            if version_of(self.found[name]) != before or memory_of(self.found[name]) is not memory
        ]

    def _stands(self) -> bool:
        now = self.module._buffers
        return len(now) == len(self.found) and all(now.get(name) is buffer for name, buffer in self.found.items())

    def _statistics_moved(self) -> bool:
        return self._batches is None or _batches(self.module) != self._batches

    def is_as_found(self) -> bool:
        if self.is_statistics:
            return not (self._statistics_moved() if self.has_run is None else self.has_run)
        return self.copies is None and self._stands() and not self.stale()

    def for_rerun(self) -> dict[str, Tensor | None]:
        if self.is_statistics:
            return _copies(self.module._buffers)
        return self.found if self.copies is None else _copies(self.copies)

    def stale(self) -> list[Stale]:
        return [] if self.copies is not None else [self._stale(name) for name in self._moved()]

    def _stale(self, name: str) -> Stale:
        buffer = self.found[name]
        assert buffer is not None
        advice = (
            "A buffer that a forward changes is copied before each forward once it is known to be one: from the first "
            "call on, or from now on. Pass a policy, whose regions run nothing again, or "
            'determinism_check="none" if the change does no harm.'
        )
        return Stale(buffer, self.versions[name][0], f"Buffer {name!r} of {messages.name_of(self.module)}", advice)


class _Attributes:
    """Tensors that are plain attributes of a module with forward pre-hooks (Rule 4)."""

    __slots__ = ("_found", "_module")

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        #: Without their graph, which may own an earlier region.
        self._found = {name: (weakref.ref(tensor), _C.without_graph(tensor)) for name, tensor in tensors.items()}

    def replaced(self) -> dict[str, Tensor]:
        """Return the forward's tensors where there is another one now."""
        now = vars(self._module)
        return {name: alias for name, (tensor, alias) in self._found.items() if now.get(name) is not tensor()}

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Run the body with the forward's tensors."""
        replaced = self.replaced()
        outside = {name: vars(self._module)[name] for name in replaced if name in vars(self._module)}
        vars(self._module).update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                vars(self._module).pop(name, None)
            vars(self._module).update(outside)


class Buffers:
    """The buffers of a region's modules. See NOTE [ Buffers ]."""

    __slots__ = ("_attributes", "_noted", "_was_watched")

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._noted = [_Noted(module) for module in dict.fromkeys(modules)]
        self._attributes = [_Attributes(one.module) for one in self._noted if one.module._forward_pre_hooks]
        self._was_watched = False

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in the forward instead of `function` (Rule 2)."""
        new = [noted for noted in self._noted if not noted.is_known]
        self._was_watched = True
        return partial(_call_watched, new, function) if new else function

    def forward_done(self) -> None:
        """Record which buffers the forward changed."""
        for noted in self._noted:
            noted.forward_done(was_watched=self._was_watched)

    def are_as_found(self) -> bool:
        """Whether a rerun needs neither copies nor checks of reads."""
        return all(noted.is_as_found() for noted in self._noted) and not any(
            attributes.replaced() for attributes in self._attributes
        )

    @contextmanager
    def as_found(self) -> Iterator[list[Stale]]:
        """Run the body with the forward's buffers (Rule 1); yield those that it must not read (Rule 3)."""
        noted = [one for one in self._noted if not one.is_as_found()]
        outside = [dict(one.module._buffers) for one in noted]
        try:
            for one in noted:
                _put(one.module, one.for_rerun())
            with ExitStack() as stack:
                for attributes in self._attributes:
                    stack.enter_context(attributes.as_found())
                yield [stale for one in noted for stale in one.stale()]
        finally:
            for one, buffers in zip(noted, outside, strict=True):
                _put(one.module, buffers)


def note_buffers(modules: list[torch.nn.Module]) -> Buffers:
    """Return the current buffers of these modules; called from C++."""
    return Buffers(modules)


def _is_batch_norm(kind: type) -> bool:
    return kind in _BATCH_NORMS or (kind.__name__ in _TIMM_BATCH_NORMS and kind.__module__ == "timm.layers.norm_act")


def _batches(module: torch.nn.Module) -> tuple[int, int] | None:
    """Return the batch counter of a BatchNorm and the counter's version; None if it has none."""
    count = module._buffers.get("num_batches_tracked")
    return None if count is None else (id(count), version_of(count))


def _put(module: torch.nn.Module, buffers: dict[str, Tensor | None]) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)


def _copies(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    with torch.no_grad():
        return {name: None if buffer is None else _copy(buffer) for name, buffer in buffers.items()}


def _copy(buffer: Tensor) -> Tensor:
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


def _call_watched(new: list[_Noted], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _FirstWrites(new):
        return function(*args, **kwargs)


_NOWHERE: tuple[Any, None, str] = (None, None, "")


class _FirstWrites(ObservingMode):
    """Copies the buffers of a module before the first operator that writes to one (Rule 2)."""

    supports_higher_order_operators = True

    def __init__(self, modules: Sequence[_Noted]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        places = [(noted, name) for noted in modules for name in noted.found]
        storages = [storage_of(noted.found[name]) for noted, name in places]
        self._places = {id(s): (s, *place) for s, place in zip(storages, places, strict=True) if s is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            _, noted, _ = self._places.get(id(storage_of(tensor)), _NOWHERE)
            if noted is not None:
                noted.has_run = True
        for tensor in written_tensors(func, args, kwargs):
            _, noted, name = self._places.get(id(storage_of(tensor)), _NOWHERE)
            if noted is not None:
                noted.note_write(name)
        return func(*args, **kwargs)


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes to, according to its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tensors_in([arguments.get(name) for name in names])


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the arguments of an operator."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, tuple | list) else []
