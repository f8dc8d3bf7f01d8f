"""Saved-tensor hooks that move what is worth it to a store, and bring it back in time.

NOTE [ Offload ]

Rule 1. Parameters, buffers and their views stay: somebody else keeps them anyway. A parameter is a leaf
        that requires grad, or of type Parameter; once one was seen, its storage is known, so that aliases
        without a base (`w.detach()`, `w.data`) stay too. Buffers are looked up in the modules whose forward
        runs, and in what a region with `offload_inputs` calls.
Rule 2. What stays is held as a detached alias, unless it is a parameter: an output held as such would keep its own
        graph alive, and so may what the attributes of any tensor refer to.
Rule 3. Hooks switch autograd's version check off, so every handle has one of its own. For a moved tensor a
        canary does it: an alias that shares the version counter but not the storage. Of a subclass, whose
        inner tensors do not count what is done to it, the tensor itself is asked as long as it lives.
Rule 4. Every unpack gives a fresh alias: users (TransformerEngine) clear what they were given. It shares the
        canary's version counter, so a backward that changes what it saved is noticed by the next unpack. But what needs
        no grad, stayed, and is held by the program still, comes back as the very object, as in plain autograd, unless
        TransformerEngine saved it. An alias has the attributes of the object (csrc/core/original.h).
Rule 5. Bytes that were brought back are let go of after their unpack, since with `retain_graph` the handle
        lives on; those saved several times, when backward ends. See also NOTE [ Reading ahead ].
Rule 6. Nothing is moved during a rerun: what it saves is needed at once.

What is here runs for tensor subclasses, for leaves that may be buffers, and for errors; all else is in csrc/hooks:
one call of C++ per pack and one per unpack.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, suppress
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actckpt import _C
from actckpt._core import torch_private
from actckpt._core.counters import counters
from actckpt._core.functions import check_runs_when_called, contents_of
from actckpt._core.region_report import Figures, Report
from actckpt._core.sites import modules_on_stack
from actckpt._core.subclasses import TakenApart
from actckpt.errors import SavedTensorChangedError, StillOpenError

__all__ = ["DEFAULT_MIN_BYTES", "EVERYTHING_STAYS", "Destination", "Offloading", "Session", "keep_in_place"]

#: Below it the bookkeeping costs more than the memory is worth.
DEFAULT_MIN_BYTES = 1 << 20
#: No tensor is as large: under such a session everything stays.
EVERYTHING_STAYS = 1 << 62
#: Where saved tensors are moved.
Destination = Literal["auto", "host", "disk"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Session(_C.OffloadSession):
    """One `offload` block: `Session(to, min_bytes)`.

    `session.pack(tensor, may_share=True)` returns a handle, `Session.unpack(handle)` the tensor.
    """

    @property
    def hooks(self) -> torch_private.Hooks:
        """The pack and unpack hooks."""
        return self.pack, self.unpack


class Offloading(ContextDecorator):
    """A context that offloads to `to` what is saved inside, with a session of its own each time."""

    def __init__(self, to: Destination, min_bytes: int) -> None:
        self._to = to
        self._min_bytes = min_bytes
        self._entered = threading.local()
        self._figures = Figures()

    def __call__(self, func: _Function) -> _Function:
        """Return a function that runs in such a block each time."""
        check_runs_when_called(func, "offload")
        return super().__call__(func)

    def __enter__(self) -> "Offloading":
        session = Session(self._to, self._min_bytes)
        self._figures = Figures()
        self._figures.watch(session)
        hooks = saved_tensors_hooks(*session.hooks)
        hooks.__enter__()
        if not hasattr(self._entered, "open"):
            self._entered.open = []
        self._entered.open.append((session, hooks))
        return self

    def __exit__(self, *exception: object) -> None:
        opened = getattr(self._entered, "open", None)
        if not opened:
            raise StillOpenError(
                "This offload block is not open in this thread: it was never entered, was closed before, or was "
                "entered in another thread, which has to close it."
            )
        session, hooks = opened[-1]
        innermost = torch_private.outer_hooks()
        if innermost is not None and innermost[0] is not hooks.pack_hook:
            raise StillOpenError(
                "This offload block is being closed before what was opened in it: another block, a region, or "
                "saved-tensor hooks. Close those first. It is still open."
            )
        opened.pop()
        hooks.__exit__(*exception)
        if not session.has_moved and self._min_bytes < EVERYTHING_STAYS and not _C.is_rerunning():
            counters.add("idle_offloads", 1)

    def report(self) -> Report:
        """Return what the block that was entered last moved, what stayed since it is small, and the peak so far.

        Example::

            >>> import torch, actckpt
            >>> with actckpt.offload(min_bytes="1KiB") as block:
            ...     y = torch.randn(256, 64, requires_grad=True).sin().sin()
            >>> block.report().offloaded_bytes
            65536
        """
        return self._figures.report()


def pack_otherwise(session: "_C.OffloadSession", tensor: Tensor) -> "_C.OffloadHandle":
    """Pack a tensor that is neither a plain tensor nor a parameter."""
    if not _comes_apart(tensor):
        return _C.stays(tensor)
    # Shared with nobody: the versions of the parts do not tell what was done to the outer tensor.
    return TakenApart(tensor, partial(session.pack, may_share=False), session.unpack)


def _comes_apart(tensor: Tensor) -> bool:
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return False
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_inference():
        return False
    base = tensor._base if tensor._is_view() else None
    root = tensor if base is None else base
    return not (root.is_leaf and root.requires_grad) and not isinstance(root, torch.nn.Parameter)


def is_owned(tensor: Tensor) -> bool:
    """Whether a leaf is a buffer or parameter of a module whose forward runs, or a view of one (Rule 1)."""
    address = tensor.untyped_storage().data_ptr()
    return any(_address(found) == address for module in modules_on_stack() for found in _own_storages(module))


def _address(storage: torch.UntypedStorage) -> int:
    """Return where a storage's bytes are, 0 where they cannot be reached."""
    try:
        return storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def keep_in_place(function: Callable[..., Any]) -> None:
    """Never move the parameters and buffers of what a region calls (Rule 1).

    Args:
        function: a module or a method of one, all of which is meant; of another function those modules that
            its closure holds, without the modules in them: that may be a whole model, at every call.
    """
    if isinstance(function, partial):
        return keep_in_place(function.func)
    owner = getattr(function, "__self__", function)
    modules = list(owner.modules()) if isinstance(owner, torch.nn.Module) else []
    for cell in getattr(function, "__closure__", None) or ():
        held = contents_of(cell)
        if isinstance(held, torch.nn.Module):
            modules.append(held)
    for module in modules:
        for storage in _own_storages(module):
            _C.note_owned(storage)
    return None


def _own_storages(module: torch.nn.Module) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of what a module itself owns."""
    for owned in (*module._parameters.values(), *module._buffers.values()):
        if owned is not None and owned.layout is torch.strided:
            # Bytes of torch.func's wrappers cannot be reached.
            with suppress(NotImplementedError, RuntimeError):
                yield owned.untyped_storage()


def freed_error(shape: torch.Size, dtype: torch.dtype, nbytes: int, expected: int) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        f"The memory of a saved tensor of shape {tuple(shape)}, {dtype}, was freed or made smaller before backward "
        f"(untyped_storage().resize_).\nIts storage has {nbytes} bytes; saved were {expected}.\n"
        "It could not be moved to the store (see actckpt.stats().failed_writes): keep its memory until backward."
    )
