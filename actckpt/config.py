"""Settings of the process: limits and folders."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypedDict, get_args

from typing_extensions import Unpack

from actckpt._text import operator_names
from actckpt._text.operator_names import Operators
from actckpt._text.places import Selector
from actckpt._text.sizes import parse_bytes
from actckpt._text.suggestions import did_you_mean

__all__ = ["Settings", "configure", "parse_bytes"]

_PROBE_BYTES = 4096
#: Names in `opaque` with these prefixes are operators; other prefixes may also be module names.
_NAMESPACES = ("aten", "prims")


Audit = Literal["first", "always", "off"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `configure`. Sizes are in bytes; None: automatic."""

    #: Maximum pinned host memory. None: half of the free memory of the machine and its cgroup, per rank of this node.
    host_limit: int | None = None
    #: Maximum size of the spill file. None: the free space of the file system.
    disk_limit: int | None = None
    #: Folder of the spill file. None: that of `tempfile`, and device tensors never go to disk.
    spill_dir: str | None = None
    #: Maximum in-flight bytes to a store, and maximum prefetched bytes. `"auto"`: follow the sizes of what is stored,
    #: from 4 to 256 MiB.
    max_inflight: int | str = "auto"
    #: Threads that copy CPU tensors, and device tensors from pinned memory to disk.
    num_workers: int = 2
    #: Whether offloading CPU tensors sets malloc's mmap threshold once, so that freed tensors return their memory to
    #: the system. glibc only.
    fix_malloc: bool = True

    #: When checksums of dropped tensors are compared with their replay: `"first"`: until their place in the program has
    #: passed once; `"always"`; `"off"`.
    audit: Audit = "first"
    #: Operators (`"aten.mul.Tensor"`, or `"aten.mul"` for all overloads), modules (`"blocks.3.attention"`) and both
    #: (`"blocks.3.attention::aten.mul"`), also with wildcards, whose values are never replayed.
    opaque: tuple[str, ...] = ()
    #: Types of the program's dispatch modes that change no results: values below them are replayed as usual.
    observers: tuple[type, ...] = ()
    #: A function that orders the operators of a replay. None: the one in actckpt/_replay/schedule.py.
    replay_order: Any = None
    #: Whether backward work that runs out of memory runs once more.
    rescue: bool = True

    @property
    def window_bytes(self) -> int | None:
        """`max_inflight`; None: follows the sizes."""
        return self.max_inflight if isinstance(self.max_inflight, int) else None

    @property
    def spill_folder(self) -> str:
        """The folder of the spill file."""
        return self.spill_dir if self.spill_dir is not None else tempfile.gettempdir()


class SettingsKeywords(TypedDict, total=False):
    """The argument types of `configure`."""

    host_limit: int | str | None
    disk_limit: int | str | None
    spill_dir: str | bytes | os.PathLike[str] | None
    max_inflight: int | str
    num_workers: int
    fix_malloc: bool
    audit: Audit
    opaque: Operators
    observers: Collection[type]
    replay_order: Callable[[Any], Iterable[int]] | None
    rescue: bool


_settings = Settings()
#: Number of `configure` calls, so that stores notice a change.
generation: int = 0


def settings() -> Settings:
    """Return the current settings."""
    return _settings


def configure(**settings: Unpack[SettingsKeywords]) -> Settings:
    """Change settings; others stay. Stores created afterwards use them.

    Args:
        host_limit: maximum pinned host memory, a number or a text like `"64GiB"`; None: automatic. Below 32 KiB GPU
            tensors stay where they are.
        disk_limit: maximum size of the spill file; None: no limit of ours.
        spill_dir: folder of the spill file; None: that of `tempfile`, and device tensors never go to disk.
        max_inflight: maximum in-flight bytes to a store, and maximum prefetched bytes. `"auto"`: the square root of the
            stored bytes times their largest tensor, at least four of the largest, and from 4 to 256 MiB.
        num_workers: threads that copy between memory and disk, at least 0 (GPU tensors: at least 1 is used).
        fix_malloc: set malloc's mmap threshold when CPU tensors are offloaded.
        audit: `"first"`, `"always"` or `"off"`: when checksums of dropped tensors are compared with what recomputation
            makes. `"first"`: of replays, the first time that a place runs; of reruns, calls 1, 2, 4, 8, ... of a
            function.
        opaque: operators (also by name) and names of modules, also with wildcards, whose values are never replayed.
        observers: types of dispatch modes (`TorchDispatchMode`) that change no results, in addition to those of this
            package and of torch's tools. Values made below any other mode are kept.
        replay_order: a function from a `ReplayGraph` to the numbers of its steps in the order of execution; None: the
            built-in order, which minimizes the peak heuristically.
        rescue: whether what runs out of memory runs once more, after caches were emptied: reruns, replays and reloads
            in backward, and on devices forwards of blocks under a budget.
    Returns:
        The current settings.
    Raises:
        ValueError: an unknown setting, an invalid size, a folder that cannot be written to, an operator that does not
            exist, or a value of the wrong type. No setting changes then.

    Example::

        >>> import actckpt
        >>> actckpt.configure(max_inflight="256MiB").max_inflight
        268435456
    """
    global _settings, generation
    changes: dict[str, Any] = dict(settings)
    known = {field.name for field in dataclasses.fields(Settings)}
    unknown = sorted(set(changes) - known)
    if unknown:
        near = did_you_mean(unknown, sorted(known))
        raise ValueError(f"configure: unknown setting {', '.join(unknown)}.{near} Known: {', '.join(sorted(known))}.")
    for name in ("host_limit", "disk_limit", "max_inflight"):
        if name in changes:
            changes[name] = _checked_size(name, changes[name])
    if changes.get("spill_dir") is not None:
        changes["spill_dir"] = _checked_folder(changes["spill_dir"])
    workers = changes.get("num_workers", 0)
    if not isinstance(workers, int) or isinstance(workers, bool) or not 0 <= workers <= 64:
        raise ValueError(f"configure: num_workers={workers!r}. Pass a whole number from 0 to 64.")
    for name in ("fix_malloc", "rescue"):
        if not isinstance(changes.get(name, True), bool):
            raise ValueError(f"configure: {name}={changes[name]!r}. Pass True or False.")
    _check_replay(changes)
    _settings = dataclasses.replace(_settings, **changes)
    generation += 1
    return _settings


def _checked_size(name: str, size: object) -> int | str | None:
    """Return a size in bytes, or another value that the setting `name` accepts."""
    if size is None and name != "max_inflight":
        return None
    return "auto" if size == "auto" and name == "max_inflight" else parse_bytes(size, what=f"configure: {name}")


def _check_replay(changes: dict[str, Any]) -> None:
    audit = changes.get("audit", "first")
    if audit not in get_args(Audit):
        raise ValueError(f"configure: audit={audit!r}. Pass 'first', 'always' or 'off'.")
    order = changes.get("replay_order")
    if order is not None and not callable(order):
        raise ValueError(f"configure: replay_order={order!r} is a {type(order).__name__}. Pass a function or None.")
    if "opaque" in changes:
        changes["opaque"] = _checked_names(changes["opaque"])
    if "observers" in changes:
        changes["observers"] = _checked_types(changes["observers"])


def _checked_types(observers: Any) -> tuple[type, ...]:
    types: list[Any] = list(observers) if isinstance(observers, Iterable) and not isinstance(observers, str) else [None]
    if not all(isinstance(kind, type) and hasattr(kind, "__torch_dispatch__") for kind in types):
        raise ValueError(f"configure: observers={observers!r}. Pass a list of types of dispatch modes, not modes.")
    return tuple(types)


def _checked_names(opaque: Any) -> tuple[str, ...]:
    """Return the names in `opaque`; operators of torch must exist."""
    entries = list(opaque) if isinstance(opaque, Iterable) and not isinstance(opaque, str) else [None]
    if not all(isinstance(name, str) or hasattr(name, "_schema") or hasattr(name, "overloads") for name in entries):
        raise ValueError(f"configure: opaque={opaque!r}. Pass a list of operators and of names of modules.")
    names = [str(name) for name in entries]
    names = [_operator(name) if "::" in name else name for name in names]
    for name in names:
        selector = Selector.parse(name)
        operator = selector.operator or selector.name or ""
        if operator.split(".")[0] in _NAMESPACES and not operator_names.exists(operator):
            near = operator_names.nearest(operator)
            raise ValueError(f"configure: opaque={name!r} names an operator that does not exist. Nearest: {near}.")
    return tuple(names)


def _operator(name: str) -> str:
    """Return the name of an operator that torch writes as `namespace::name`; other names as they are."""
    dotted = name.replace("::", ".")
    return dotted if name.partition("::")[0] in _NAMESPACES or operator_names.exists(dotted) else name


def _checked_folder(folder: object) -> str:
    try:
        path = os.fsdecode(folder)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"configure: spill_dir={folder!r} is a {type(folder).__name__}. Pass a folder.") from None
    if not os.path.isdir(path):
        raise ValueError(f"configure: spill_dir={path!r} is not a folder that can be written to. Pass another one.")
    try:  # some folders (/proc, for root) pass every other check
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise ValueError(
            f"configure: spill_dir={path!r} is not a folder that can be written to: {error.strerror} "
            f"(errno {error.errno}). Pass another one."
        ) from None
    return path
