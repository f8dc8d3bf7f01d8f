"""Stores that fail to give up what they read ahead."""

from __future__ import annotations

import pytest
import torch
from internals.stores import PythonStore, PythonTicket, settle, store_in_memory, using
from oracle import assert_equal, leaf

import actckpt
from actckpt import _C


class _FailingUnloads(PythonStore):
    """A store whose next unloads raise `errors`."""

    errors: list[Exception]

    def unload(self, ticket: PythonTicket) -> None:
        super().unload(ticket)
        if self.errors:
            raise self.errors.pop()


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
