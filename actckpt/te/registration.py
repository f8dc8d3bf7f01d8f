"""Registers the extension for TransformerEngine once that is loaded."""

import importlib

from actckpt._core import extensions
from actckpt.errors import TransformerEngineError
from actckpt.te.internals import PACKAGE, READ_VERSIONS, Internals, installed_version, read_already
from actckpt.te.offloadable import SavedByModules
from actckpt.te.regions import Provider

__all__ = ["await_te", "describe", "ignore", "leave_fsdp_group", "provider"]

#: The extension of the loaded TransformerEngine, if it is registered.
_registered: list[Provider] = []


def await_te() -> None:
    """Register at the first region after TransformerEngine has been loaded."""
    extensions.register(SavedByModules())
    extensions.await_package(PACKAGE, _make)


def _make() -> Provider:
    _registered.append(Provider(Internals()))
    return _registered[-1]


def ignore() -> None:
    """Ignore TransformerEngine's state from now on: for processes whose regions never run its modules.

    Regions over its modules then compute wrong gradients under delayed scaling.
    """
    extensions.forget_package(PACKAGE)
    while _registered:
        registered = _registered.pop()
        extensions.unregister(registered)
        registered.close()


def provider() -> Provider | None:
    """Return the extension that carries TransformerEngine's state; None if it is not loaded, or ignored.

    Raises:
        TransformerEngineError: its internals differ from those of the versions that were read.
    """
    extensions.register_lazy_extensions()
    return _registered[0] if _registered else None


def leave_fsdp_group(function: object) -> None:
    """Stop a TransformerEngine module from sharding what it saves over its FSDP group."""
    registered = provider()
    if registered is not None:
        registered.te.leave_fsdp_group(function)


def describe() -> str:
    """Return which TransformerEngine there is and what of it is carried, for `actckpt doctor`. Loads it."""
    version = installed_version()
    if version is None:
        return "not installed: pip install 'actckpt[te]' on a machine with a CUDA build of torch"
    try:
        importlib.import_module(PACKAGE)
        Internals()
    except TransformerEngineError as error:
        return f"{version}, off: {' '.join(str(error).split())}"
    except Exception as error:  # the reason why it does not load is the finding
        return f"{version} is installed but does not load: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    known = "read" if read_already(version) else f"newer than what was read ({READ_VERSIONS[1]}), with the same names"
    return f"{version} ({known}): regions carry FP8 state, recompute flags and generators; offloading leaves weights"
