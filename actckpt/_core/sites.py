"""The Python stack of the operator that is running: the user's line, and the modules whose forward runs."""

import inspect
import linecache
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TypeAlias

import torch

from actckpt._core.warning_texts import WarningText

__all__ = [
    "is_code_running",
    "module_name",
    "modules_on_stack",
    "qualified_name",
    "user_line",
    "warn_once",
    "warn_user",
]

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_shown: set[tuple[WarningText, str]] = set()


def user_line() -> str:
    """Return `file:line in function: source` of the innermost frame outside torch and actckpt."""
    for frame in _frames_outward():
        path = frame.f_code.co_filename
        if _is_users(frame):
            source = linecache.getline(path, frame.f_lineno).strip()
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}: {source}"
    return "an unknown line"


def warn_user(text: WarningText, **values: object) -> None:
    """Warn at the innermost line outside torch and actckpt: of the user, who called what led here.

    In a thread of autograd's there is none: then at the line that calls this.
    """
    level = 2
    for number, frame in enumerate(_frames_outward(), start=1):  # the first is that of this function
        if _is_users(frame):
            level = number
            break
    warnings.warn(text.message(**values), text.category, stacklevel=level)


def warn_once(text: WarningText, key: str = "", **values: object) -> None:
    """Warn once per text and key in this process."""
    if (text, key) not in _shown:
        _shown.add((text, key))
        warn_user(text, **values)


def _is_users(frame: FrameType) -> bool:
    if frame.f_globals.get("__name__") == "__main__":
        return True  # also where there is no file
    path = frame.f_code.co_filename
    return not path.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<"))


def modules_on_stack() -> Iterator[torch.nn.Module]:
    """Yield the modules whose methods are running, innermost first."""
    for frame in _frames_outward():
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED or "self" not in code.co_varnames[: code.co_argcount]:
            continue  # not a method
        owner = frame.f_locals.get("self")
        if sys.version_info < (3, 13):
            # A snapshot that the frame would keep, and with it every local tensor of the caller.
            frame.f_locals.clear()
        if isinstance(owner, torch.nn.Module):
            yield owner


def is_code_running(package: str) -> bool:
    """Whether a function of a package is running in this thread."""
    names = (frame.f_globals.get("__name__") for frame in _frames_outward())
    return any(isinstance(name, str) and name.partition(".")[0] == package for name in names)


#: What torch puts between a module and the ones that it wraps: these parts of names stand for nothing.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_REPLICATED = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)

_Names: TypeAlias = "weakref.WeakKeyDictionary[torch.nn.Module, str]"
_names: "weakref.WeakKeyDictionary[torch.nn.Module, _Names]" = weakref.WeakKeyDictionary()


def module_name() -> str | None:
    """Return the qualified name of the module whose method is running, as the outermost one knows it, or None."""
    modules = list(modules_on_stack())
    return qualified_name(modules[-1], modules[0]) if modules else None


def qualified_name(root: torch.nn.Module, module: torch.nn.Module) -> str:
    """Return the name of a module in the outermost one, without what torch wraps it in; its type if it is that one."""
    if type(root).__hash__ is None or type(module).__hash__ is None:
        return type(module).__name__
    names = _names.get(root)
    if names is None or module not in names:
        found = {inner: _unwrapped(root, name) or type(inner).__name__ for name, inner in root.named_modules()}
        names = _names[root] = weakref.WeakKeyDictionary(found)
    return names.get(module) or type(module).__name__


def _unwrapped(root: torch.nn.Module, name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] and isinstance(root, _REPLICATED) else parts)


def _frames_outward() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
