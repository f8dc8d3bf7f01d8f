"""Saved-tensor hooks that offload large tensors to a store, and load them in time.

NOTE [ Offload ]

Rule 1. Parameters, buffers and their views stay: they are kept anyway. A parameter is a leaf that requires grad, or of
type Parameter. Its storage is remembered, so that aliases without a base (`w.detach()`, `w.data`) stay too. Buffers are
looked up in the modules whose forward runs, and in the function of a region with `offload_inputs`.
Rule 2. A tensor that stays is held as a detached alias, unless it is a parameter. An output held directly would keep
its own graph alive, and so may objects in the attributes of any tensor.
Rule 3. Hooks disable autograd's version check, so every handle has its own. An offloaded tensor has a canary: an alias
that shares the version counter but not the storage. A subclass is checked itself while it is alive, because its inner
tensors do not count its changes.
Rule 4. Every unpack returns a fresh alias, because users (TransformerEngine) clear what they get. It shares the
canary's version counter, so the next unpack notices a backward that changes its saved tensor. If the tensor needs no
grad, stayed, and is still held by the program, unpack returns the object itself, as plain autograd does, unless
TransformerEngine saved it. An alias has the attributes of the object (csrc/core/saved_identity.h).

Loaded bytes are released after their unpack, since with `retain_graph` the handle lives on. Bytes saved several times
are released when backward ends. See also NOTE [ Prefetching ]. Nothing is offloaded during a rerun: what it saves is
needed at once.

This module opens `offload` blocks, and handles subclasses and errors. All else is in csrc/offload/session.h, with one
C++ call per pack and one per unpack.
"""

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actckpt import _C
from actckpt._C import EVERYTHING_STAYS, OffloadSession as Session
from actckpt._core import messages, torch_private
from actckpt._core.counters import counters
from actckpt._core.functions import check_runs_when_called
from actckpt._core.region_report import Figures, Report
from actckpt._core.subclasses import FlattenedSubclass
from actckpt.errors import SavedTensorChangedError, StillOpenError

__all__ = ["DEFAULT_MIN_BYTES", "Destination", "Offloading", "Session"]

#: Below this size the bookkeeping costs more than the memory is worth.
DEFAULT_MIN_BYTES = 1 << 20
#: Where saved tensors are offloaded to.
Destination = Literal["auto", "host", "disk"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Offloading(ContextDecorator):
    """A context that offloads tensors saved inside it to `to`; each entry has its own session."""

    def __init__(self, to: Destination, min_bytes: int) -> None:
        self._to = to
        #: Smaller tensors stay.
        self.min_bytes = min_bytes
        self._entered = threading.local()
        self._figures = Figures()

    def __call__(self, func: _Function) -> _Function:
        """Return a function that runs in such a block each time."""
        check_runs_when_called(func, "offload")
        return super().__call__(func)

    def __enter__(self) -> "Offloading":
        session = Session(self._to, self.min_bytes)
        self._figures = Figures()
        self._figures.watch(session)
        hooks = saved_tensors_hooks(*session.hooks)
        try:
            hooks.__enter__()
        except RuntimeError as error:
            messages.raise_if_hooks_are_refused(error, "offload")
            raise
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
        if not session.has_moved and self.min_bytes < EVERYTHING_STAYS and not _C.is_rerunning():
            counters.add("idle_offloads", 1)

    def report(self) -> Report:
        """Return what the block entered last offloaded, what stayed because it is small, and the peak so far.

        Example::

            >>> import torch, actckpt
            >>> with actckpt.offload(min_bytes="1KiB") as block:
            ...     y = torch.randn(256, 64, requires_grad=True).sin().sin()
            >>> block.report().offloaded_bytes
            65536
        """
        return self._figures.report()


def pack_parts(session: Session, tensor: Tensor) -> FlattenedSubclass:
    """Pack a subclass that has inner tensors."""
    # Not shared: the versions of the parts do not count changes of the outer tensor.
    return FlattenedSubclass(tensor, partial(session.pack, may_share=False), session.unpack)


def freed_error(shape: torch.Size, dtype: torch.dtype, nbytes: int, expected: int) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        f"The memory of a saved tensor of shape {tuple(shape)}, {dtype}, was freed or made smaller before backward "
        f"(untyped_storage().resize_).\nIts storage has {nbytes} bytes; saved were {expected}. "
        "Keep its memory until backward."
    )


def replaced_error(nbytes: int) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        f"The memory of a saved tensor, {nbytes} bytes, was replaced while it was copied to the store: its storage "
        "grew or was made smaller. What was copied is not what was saved.\n"
        "Keep tensors that change size out of the offload block."
    )


def filled_late_error(shape: torch.Size, dtype: torch.dtype) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        f"The noise of rrelu, of shape {tuple(shape)}, {dtype}, was offloaded before rrelu had drawn it: autograd "
        "saves it first.\nKeep rrelu out of the offload block, or raise its min_bytes above the size of that noise. "
        'A policy moves it at the right time: `actckpt.region("offload")`.'
    )
