"""Stores that fail to give up what they read ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from internals.stores import PythonStore, settle, store_in_memory, using
from oracle import assert_equal, leaf

import actckpt
from actckpt import _C


class _Ticket:
    def __init__(self, inner: Any, errors: list[Exception]) -> None:
        self.inner, self.errors = inner, errors

    def unload(self) -> None:
        self.inner.unload()
        if self.errors:
            raise self.errors.pop()


class _FailingUnloads(PythonStore):
    """A store whose next unloads raise `errors`."""

    errors: list[Exception]

    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> _Ticket:
        return _Ticket(super().put(source, nbytes, must=must), self.errors)

    def fetch(self, ticket: _Ticket, nbytes: int, device: torch.device) -> _C.Bytes:
        return super().fetch(ticket.inner, nbytes, device)

    def prefetch(self, ticket: _Ticket, nbytes: int, device: torch.device) -> _C.Bytes | None:
        return super().prefetch(ticket.inner, nbytes, device)


def test_an_unload_that_fails_at_the_end_of_backward_leaves_no_other_tensor_behind() -> None:
    x = leaf(64, 64)
    store = _FailingUnloads(store_in_memory())
    store.errors = []
    with using(store):
        with actckpt.offload(min_bytes=0):
            middle = x.sin().exp().sin().exp().sin()
            y = middle.exp().square().sum()
        store.inner.flush()
        store.inner.poll()
        fetched = torch.autograd.grad(y, middle, retain_graph=True)  # the rest is read ahead in vain
        assert len(store.buffers) > 2
        store.errors += [OSError("the second"), OSError("the first")]
        with pytest.raises(OSError, match="the first"):
            torch.autograd.grad(y, middle, retain_graph=True)
        assert store.errors == []
        assert _C.release_read_ahead(1 << 40) == 0, "something is in the window still"
        settle(store.inner)
        assert not any(buffer() for buffer in store.buffers)
        assert_equal(torch.autograd.grad(y, middle, retain_graph=True), fetched)
