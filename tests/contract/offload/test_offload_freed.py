"""Memory that is freed, replaced or filled anew after a tensor in it was saved: no crash, no wrong number."""

from __future__ import annotations

import errno
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
from internals.stores import (
    KINDS,
    PythonStore,
    faults,
    faulty_store,
    flush,
    store_of_kind,
    store_on_disk,
    using,
)
from offload_oracle import free_and_fill, free_memory
from oracle import FailsInBackward, leaf

import actckpt

#: More than a bounce buffer: a part of it is read only once the first write goes on.
ROWS = 3 << 20


@contextmanager
def _held_writes(folder: Path, num_workers: int) -> Iterator[Callable[[], None]]:
    """Yield what releases writes that have begun."""
    with faulty_store(folder, num_workers=num_workers) as io:
        io.set(faults(hold_writes=True))
        try:
            yield lambda: io.set(faults())
        finally:
            io.set(faults())


def _free_by_its_old_name(h: torch.Tensor) -> None:
    h._typed_storage()._resize_(0)


def _end_copies_out_of_a_device() -> None:
    if on_device.device_type != "cpu":
        flush()


_WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "freed": free_memory,
    "freed and filled anew": free_and_fill,
    "freed by its old name": _free_by_its_old_name,
    "moved to shared memory": lambda h: h.detach().share_memory_(),
    "made smaller": lambda h: h.untyped_storage().resize_(4096),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", _WAYS)
def test_memory_freed_while_it_is_copied_out_gives_what_was_saved(tmp_path: Path, how: str, num_workers: int) -> None:
    x = leaf(ROWS)
    with _held_writes(tmp_path, num_workers) as let_go:
        h = x * 1.5
        expected = h.detach().cos() * 1.5
        with actckpt.offload(min_bytes=0):
            y = h.sin()
        timer = threading.Timer(0.1, let_go)
        _end_copies_out_of_a_device()
        timer.start()
        _WAYS[how](h)
        timer.join()
        flush()
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize("is_flushed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_memory_holds_when_it_is_filled_anew_is_saved_anew(kind: str, is_flushed: bool) -> None:
    """Nothing counts what is done to a storage itself as a change: the tensor has the version that it had."""
    x, h = leaf(1024), torch.full((1024,), 2.0)
    with store_of_kind(kind):
        with actckpt.offload(min_bytes=0):
            first = x * h
            if is_flushed:
                flush()
            _end_copies_out_of_a_device()
            nbytes = h.untyped_storage().nbytes()
            h.untyped_storage().resize_(0)
            h.untyped_storage().resize_(nbytes)
            h.untyped_storage().copy_(torch.full((1024,), 7.0).untyped_storage())
            second, third = x * h, x * h
        found = [torch.autograd.grad(y.sum(), x)[0] for y in (first, second, third)]
    assert [float(gradient.min()) for gradient in found] == [float(gradient.max()) for gradient in found] == [2, 7, 7]


def test_memory_freed_after_its_graph_is_gone_is_no_crash(tmp_path: Path) -> None:
    """The copy that has begun goes on after its ticket was dropped."""
    with _held_writes(tmp_path, 2) as let_go:
        h = leaf(ROWS) * 1.5
        with actckpt.offload(min_bytes=0):
            y = h.sin()
        del y
        timer = threading.Timer(0.1, let_go)
        _end_copies_out_of_a_device()
        timer.start()
        free_memory(h)
        timer.join()
        flush()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_freed_whose_write_failed_gives_what_was_saved(tmp_path: Path, num_workers: int) -> None:
    x = leaf(1024)
    with faulty_store(tmp_path, num_workers=num_workers) as io:
        io.set(faults(fail_write_at=0, write_errno=errno.EIO))
        h = x * 1.5
        expected = h.detach().cos() * 1.5
        with actckpt.offload(min_bytes=0):
            y = h.sin()
        flush()
        free_memory(h)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_a_tensor_in_two_spans_whose_writes_failed_gives_what_was_saved(tmp_path: Path) -> None:
    with faulty_store(tmp_path) as io:
        io.set(faults(fail_write_at=0, write_errno=errno.EIO))
        h = leaf(1000) * 1.5
        expected = h[:300].detach().clone(), h[200:400].detach().clone()
        with actckpt.offload(min_bytes=0):
            outputs = h[:300].sin(), h[200:400].sin()
        flush()
        h.untyped_storage().resize_(1000)
        for y, saved in zip(outputs, expected, strict=True):
            assert torch.equal(y.grad_fn._saved_self, saved)


def test_what_was_brought_back_may_be_freed_by_its_reader(tmp_path: Path) -> None:
    """The next unpack brings the bytes back once more."""
    with using(store_on_disk(str(tmp_path))):
        h = leaf(1024) * 1.5
        expected = h.detach().clone()
        with actckpt.offload(min_bytes=0):
            one, other = h.sin(), h.cos()
        flush()
        del h
        first = one.grad_fn._saved_self
        assert torch.equal(first, expected)
        first.untyped_storage().resize_(0)
        assert torch.equal(other.grad_fn._saved_self, expected)


def test_storages_that_nobody_copies_do_not_wait(tmp_path: Path) -> None:
    with _held_writes(tmp_path, 2):
        h = leaf(ROWS) * 1.5
        with actckpt.offload(min_bytes=0):
            y = h.sin()
        other = torch.zeros(16)
        other.untyped_storage().resize_(0)
        assert other.untyped_storage().nbytes() == 0
    del y


def test_what_was_written_is_freed_though_nothing_else_is_saved(tmp_path: Path) -> None:
    """Less than 256 KiB would wait for more to come."""
    x, saved = leaf(66_250), torch.randn(66_250)
    alive = weakref.ref(saved.untyped_storage())
    with using(store_on_disk(str(tmp_path))):
        with actckpt.offload(min_bytes=0):
            y = x * saved
        expected = saved.tolist()
        del saved
        deadline = time.monotonic() + 60
        while alive() is not None:
            assert time.monotonic() < deadline, "written, and still in memory after 60 s"
            time.sleep(0.001)
        (found,) = torch.autograd.grad(y.sum(), x)
    assert found.tolist() == expected


class _Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return grad, None


def test_memory_freed_while_backward_holds_it_gives_what_was_saved(tmp_path: Path) -> None:
    """The first unpack is handed the tensor itself, whose write has not ended; then its memory goes."""
    x = leaf(1024)
    with _held_writes(tmp_path, 2) as let_go:
        h = x * 1.5

        def free() -> None:
            let_go()
            flush()
            free_memory(h)

        (expected,) = torch.autograd.grad((h.sin() * h.cos()).sum(), x, retain_graph=True)
        with actckpt.offload(min_bytes=0):
            y = (_Calls.apply(h.sin(), free) * h.cos()).sum()
        assert torch.equal(torch.autograd.grad(y, x)[0], expected)
        assert h.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_failed_backward_read_ahead_is_released(tmp_path: Path, num_workers: int) -> None:
    """While the graph, which is retained, lives on. The last tensor saved is the only one that is read."""
    store = PythonStore(store_on_disk(str(tmp_path), num_workers=num_workers))
    x = leaf(1024)
    with using(store):
        h = x * 1
        with actckpt.offload(min_bytes=0):
            for n in range(8):
                h = FailsInBackward.apply(h.sin()) if n == 6 else h.sin()
        store.inner.flush()
        y = h.sum()
        with pytest.raises(ArithmeticError):
            torch.autograd.grad(y, x, retain_graph=True)
        store.inner.flush()
        deadline = time.monotonic() + 60
        while any(reference() is not None for reference in store.buffers) and time.monotonic() < deadline:
            time.sleep(0.001)  # a copy that is under way ends first
            store.inner.poll()
        assert len(store.buffers) > 2, "some were read ahead"
        assert [reference() for reference in store.buffers] == [None] * len(store.buffers)
        del y
