"""Aliases with their own version counters: each may be the only one that counts a change of the shared bytes.

Autograd checks the counter of the tensor that it saved. Views share the counter of their base. `Tensor.data`, results
of `unsafe_chunk`, and operators that return an undeclared alias have their own. The tape checks the alias seen last.
The aliases seen before are recorded here; they are checked too once the region is closed.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from actckpt._C import record_version
from actckpt._core.tensor_changes import version_of
from actckpt._replay.geometry import Geometry
from actckpt._replay.lineage import Value, Window
from actckpt._replay.paused import Paused
from actckpt.errors import SavedTensorChangedError

__all__ = [
    "Seen",
    "VersionAliases",
    "VersionCheck",
    "Watched",
    "changed_after_error",
    "check_watched",
    "note_root",
    "read_stored",
    "record_parameter_versions",
    "resized_error",
    "watch_roots",
]

#: A subclass instance, and its version when the region closed.
VersionCheck = tuple[weakref.ref[Tensor], int]


class Seen(NamedTuple):
    """A subclass instance that an operator got as an argument."""

    wrapper: weakref.ref[Tensor]
    #: Its base if it is a view, else itself: both share a version counter.
    root: weakref.ref[Tensor]
    storages: list[weakref.ref[torch.UntypedStorage]]


#: For values seen through several aliases: all but the last, with their versions.
VersionAliases = weakref.WeakKeyDictionary[Value, list[tuple[weakref.ref[Tensor], int]]]


def note_root(roots: VersionAliases, value: Value, tensor: Tensor) -> bool:
    """Record that `value` is now seen through `tensor` instead of another alias; False if its bytes changed since."""
    root = tensor if tensor._base is None else tensor._base
    others = roots.setdefault(value, [])
    expected = next((version for other, version in others if other() is root), None)
    others[:] = [(other, version) for other, version in others if other() is not None and other() is not root]
    if value.root is not None:
        others.append((value.root, value.version))
    if expected is not None and version_of(tensor) > expected:
        return False
    record_version(value, tensor)
    return True


def record_parameter_versions(roots: VersionAliases) -> None:
    """Replace aliases that were seen after their parameter by the parameter, with its current version."""
    for value, others in dict(roots).items():
        parameter = value.held
        if not value.is_parameter or parameter is None:
            continue
        root = parameter if parameter._base is None else parameter._base
        for other, version in others:
            if other() is root:
                record_version(value, parameter)
                value.version = version


class Watched:
    """Bytes of a closed region whose changes several tensors count. Their versions are checked on every access.

    Args:
        get: returns a tensor on the bytes.
        roots: tensors on the same storage, and their versions.
        wrappers: subclass instances whose inner tensors hold the bytes, and their versions.
        is_away: `get` loads the bytes from a store or from outer hooks.
    """

    __slots__ = ("_bytes", "_watched", "_wrappers", "is_away")

    def __init__(
        self,
        get: Callable[[], Tensor],
        roots: Iterable[tuple[Tensor, int]],
        wrappers: Iterable[VersionCheck] = (),
        *,
        is_away: bool = False,
    ) -> None:
        self._bytes = get
        self._wrappers = list(wrappers)
        self.is_away = is_away
        with Paused():
            self._watched = [(root.detach(), version) for root, version in roots]

    def __call__(self) -> Tensor:
        """Return a tensor on the bytes, for a caller that needs all of them."""
        self.check(None)
        return self._bytes()

    def under(self, window: Window) -> Tensor:
        """Return a tensor on the bytes, for a caller that needs only those in a window."""
        self.check(window)
        return self._bytes()

    def check(self, window: Window | None) -> None:
        """Raise if the bytes in a window have changed; None: any byte."""
        start, stop = (0, torch.iinfo(torch.int64).max) if window is None else Geometry.of(window).span()
        for root, version in self._watched:
            first, last = Geometry.of_tensor(root).span()
            if first < stop and start < last and version_of(root) != version:
                raise changed_after_error(root, version)
        for reference, version in self._wrappers:
            wrapper = reference()
            if wrapper is not None and version_of(wrapper) != version:
                raise changed_after_error(wrapper, version)


def read_stored(stored: Callable[[], Tensor], window: Window | None) -> Tensor:
    """Return a tensor on stored bytes; `window`: the bytes that are needed, None: all."""
    return stored.under(window) if isinstance(stored, Watched) and window is not None else stored()


def check_watched(stored: Watched, window: Window | None) -> None:
    """Raise if bytes that were loaded earlier have changed."""
    stored.check(window)


def watch_roots(roots: VersionAliases | None, made_of: Mapping[Value, Sequence[VersionCheck]]) -> None:
    """Watch the values of a closed tape through every alias they were seen through (NOTE [ Replay ], Rule 6).

    Args:
        roots: aliases that values were seen through; None: only the last ones.
        made_of: subclass instances that hold the values as inner tensors.
    """
    seen = {} if roots is None else dict(roots)
    for value in {**seen, **made_of}:
        is_watched = value in made_of or not value.is_parameter
        if not is_watched or (value.held is None and value.stored is None):
            continue
        last = value.held if value.held is not None or value.root is None else value.root()
        others = [
            (root, version)
            for root, version in ((other(), version) for other, version in seen.get(value, ()))
            if root is not None
        ]
        if last is not None and value.version >= 0:
            others.append((last, value.version))
        held = value.held
        get = value.stored if held is None else partial(_sized, held, value.nbytes, _what(value))
        assert get is not None
        value.stored, value.held = Watched(get, others, made_of.get(value, ()), is_away=held is None), None


def _sized(held: Tensor, nbytes: int, what: str) -> Tensor:
    if held.untyped_storage().nbytes() != nbytes:
        raise _resized_error(held, nbytes, what)
    return held


def _what(value: Value) -> str:
    return "a parameter" if value.is_parameter else "an input" if value.is_input else "a tensor made in the region"


def resized_error(held: Tensor, value: Value) -> SavedTensorChangedError:
    """Return the error for an external storage that was resized (NOTE [ Replay ], Rule 6)."""
    return _resized_error(held, value.nbytes, _what(value))


def _resized_error(held: Tensor, nbytes: int, what: str) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        f"Backward needs {what} of shape {tuple(held.shape)}, {held.dtype}, "
        f"whose storage was freed or resized after the forward: it has {held.untyped_storage().nbytes()} bytes now; "
        f"{nbytes} were recorded.\nFSDP2 frees the parameters of a unit after its forward. Put the region "
        "inside each unit, as actckpt.apply(model, policy=...) before fully_shard does, not around several."
    )


def changed_after_error(tensor: Tensor, expected: int) -> SavedTensorChangedError:
    """Return the error for an in-place change after the region closed."""
    version = version_of(tensor)
    return SavedTensorChangedError(
        "One of the variables needed for gradient computation has been modified by an inplace operation after its "
        f"region closed: tensor of shape {tuple(tensor.shape)}, {tensor.dtype}.\nIt is at version {version}; expected "
        f"version {expected}.\nUse the out-of-place operator, clone the tensor before changing it, or change it inside "
        "the region."
    )
