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
        TransformerEngine saved it. An alias has the attributes of the object (csrc/core/saved_identity.h).
Rule 5. Bytes that were brought back are released after their unpack, since with `retain_graph` the handle
        lives on; those saved several times, when backward ends. See also NOTE [ Reading ahead ].
Rule 6. Nothing is moved during a rerun: what it saves is needed at once.

What is here opens blocks; it runs for tensor subclasses and for errors too. All else is in csrc/offload/session.h: one
call of C++ per pack and one per unpack.
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

#: Below it the bookkeeping costs more than the memory is worth.
DEFAULT_MIN_BYTES = 1 << 20
#: Where saved tensors are moved.
Destination = Literal["auto", "host", "disk"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Offloading(ContextDecorator):
    """A context that offloads to `to` what is saved inside, with a session of its own each time."""

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
        """Return what the block that was entered last moved, what stayed since it is small, and the peak so far.

        Example::

            >>> import torch, actckpt
            >>> with actckpt.offload(min_bytes="1KiB") as block:
            ...     y = torch.randn(256, 64, requires_grad=True).sin().sin()
            >>> block.report().offloaded_bytes
            65536
        """
        return self._figures.report()


def pack_parts(session: Session, tensor: Tensor) -> FlattenedSubclass:
    """Pack a subclass that is made of other tensors."""
    # Shared with nobody: the versions of the parts do not tell what was done to the outer tensor.
    return FlattenedSubclass(tensor, partial(session.pack, may_share=False), session.unpack)


def freed_error(shape: torch.Size, dtype: torch.dtype, nbytes: int, expected: int) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        f"The memory of a saved tensor of shape {tuple(shape)}, {dtype}, was freed or made smaller before backward "
        f"(untyped_storage().resize_).\nIts storage has {nbytes} bytes; saved were {expected}.\n"
        "It could not be moved to the store (see actckpt.stats().failed_writes): keep its memory until backward."
    )


def filled_late_error(shape: torch.Size, dtype: torch.dtype) -> SavedTensorChangedError:
    return SavedTensorChangedError(
        f"The noise of rrelu, of shape {tuple(shape)}, {dtype}, was offloaded before rrelu had drawn it: autograd "
        "saves it first.\nKeep rrelu out of the offload block, or raise its min_bytes above the size of that noise. "
        'A policy moves it at the right time: `actckpt.region("offload")`.'
    )
