"""Stores that tests choose, fill and break, and what the library's own stores hold."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch

from actckpt import _C, _checkpointed_call, config
from actckpt._core import devices
from actckpt._core.torch_private import untraced
from actckpt._offload import session, stores
from actckpt._offload.cpu import CpuStore
from actckpt._offload.device import DeviceStore

#: Stores of devices. Tensors of the CPU always go to a file: with "memory", callers copy instead of workers.
KINDS = ("disk", "memory")


_UNLIMITED = 1 << 40
_BUFFER_BYTES = 64 << 10


class TestedDeviceStore(DeviceStore):
    """The store of device tensors, with what tests ask of the store of CPU tensors."""

    __test__ = False

    @classmethod
    def made(
        cls,
        file: _C.SpillFile | None,
        *,
        limit_bytes: int = _UNLIMITED,
        window_bytes: int | None = 256 << 20,
        num_workers: int = 2,
    ) -> TestedDeviceStore:
        """Make one that has a file, and no memory but bounce buffers; pinned memory if there is no file."""
        accelerator = devices.accelerator_of(on_device.device_type)
        assert accelerator is not None
        engine = _C.DeviceEngine.cuda(
            library=accelerator.driver_library or "",
            limit_bytes=limit_bytes if file is None else 0,
            window_bytes=window_bytes,
            release=_C.TorchStreams(accelerator),
            spill_file=file,
            bounce_bytes=0 if file is None else 16 * _BUFFER_BYTES,
            buffer_bytes=_BUFFER_BYTES,
            num_workers=max(1, num_workers),
        )
        return cls(engine, accelerator)

    def flush(self) -> None:
        """Wait until all bytes have left."""
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        self.poll()
        deadline = time.monotonic() + 60
        while self.engine.stats().inflight_bytes and time.monotonic() < deadline:
            time.sleep(1e-4)
            self.poll()

    def stats(self) -> _C.DeviceStats:
        """Counters since the store was made."""
        return self.engine.stats()


Tested = CpuStore | TestedDeviceStore


def store_in_memory(**options: Any) -> Tested:
    """Return a store in pinned memory for the device that tests run on; on the CPU, one in a file.

    Then callers run every copy, so that what is alive does not depend on when a thread ends one.
    """
    if on_device.device_type == "cpu":
        return store_on_disk(config.settings().spill_folder, **{"num_workers": 0, **options})
    return TestedDeviceStore.made(None, **options)


def store_on_file(file: _C.SpillFile, **options: Any) -> Tested:
    """Return a store that keeps them in a file."""
    if on_device.device_type == "cpu":
        return CpuStore.on_file(file, **options)
    return TestedDeviceStore.made(file, **options)


def store_on_disk(folder: str, *, limit_bytes: int = _UNLIMITED, **options: Any) -> Tested:
    """Return a store that keeps them in a file of a folder."""
    return store_on_file(_C.SpillFile(folder, limit_bytes=limit_bytes), **options)


@contextmanager
def store_of_kind(kind: str, **options: Any) -> Iterator[Tested]:
    """Offload tensors to a store of our own inside the block."""
    if kind == "disk":
        store = store_on_disk(config.settings().spill_folder, **options)
    else:
        store = store_in_memory(**options)
    with using(store):
        yield store


def faults(**values: int | bool) -> Any:
    """Return faults of a disk: `fail_write_at`, `write_errno`, `hold_writes` ..., see `sim.Faults`."""
    import sim

    found = sim.Faults()
    for name, value in values.items():
        setattr(found, name, value)
    return found


@contextmanager
def faulty_store(folder: Path, **options: Any) -> Iterator[Any]:
    """Offload tensors to a disk inside the block; yields what sets its faults."""
    import sim

    io = sim.FaultyFileIo()
    with using(store_on_file(sim.spill_file(str(folder), io), **options)):
        yield io


def the_store() -> Tested | None:
    """Return the store of the tensors of tests, if there is one already, and it is ours."""
    found = stores._stores.get(on_device.device_type, (0, None))[1]
    return found if isinstance(found, CpuStore | TestedDeviceStore) else None


@contextmanager
def using(store: Any) -> Iterator[None]:
    """Offload tensors to `store` inside the block."""
    before = dict(stores._stores)
    stores._stores[on_device.device_type] = config.generation, store
    try:
        yield
    finally:
        stores._stores.clear()
        stores._stores.update(before)


def flush() -> None:
    """Wait until every byte has left, so that backward must bring it back."""
    store = the_store()
    if store is not None:
        settle(store)


def settle(store: Tested) -> None:
    """Wait until no copy holds anything: those out, and what was being read for a backward that has ended."""
    store.flush()
    store.poll()
    deadline = time.monotonic() + 60
    while store.engine.stats().graveyard_bytes:
        assert time.monotonic() < deadline, "copies that nobody waits for have not ended in 60 s"
        time.sleep(0.001)
        store.poll()
    store.poll()  # what was released since


def live_tickets() -> int:
    """Return how many tickets the store holds."""
    store = the_store()
    assert store is not None
    return store.stats().num_live


def assert_no_ticket_is_left() -> None:
    """Assert that nothing is in the store, as where every graph is gone.

    On a device, its thread of autograd releases the last graph a little later. A ticket whose bytes were being copied
    or written then is released at the store's next call after that.
    """
    store = the_store()
    deadline = time.monotonic() + 60
    while live_tickets() and time.monotonic() < deadline:
        time.sleep(0.001)
        store.poll()
    assert live_tickets() == 0, "every graph of the test is gone"


class PythonTicket:
    """A ticket of a `PythonStore`, which has its methods."""

    def __init__(self, store: PythonStore, inner: _C.StoreTicket) -> None:
        self.store, self.inner = store, inner

    @untraced
    def fetch(self) -> _C.Bytes:
        return self.store.fetch(self)

    @untraced
    def prefetch(self) -> _C.Bytes | None:
        return self.store.prefetch(self)

    @untraced
    def unload(self) -> None:
        self.store.unload(self)

    @untraced
    def saved_again(self, storage: torch.UntypedStorage) -> None:
        self.inner.saved_again(storage)


class PythonStore:
    """A store whose methods run in Python: one that a test can change. See csrc/offload/store.h."""

    def __init__(self, inner: Tested) -> None:
        self.inner = inner
        #: What was loaded, or is being loaded.
        self.buffers: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def window_bytes(self) -> int:
        return self.inner.window_bytes

    @untraced
    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> PythonTicket | None:
        ticket = self.inner.put(source, nbytes, must=must)
        return None if ticket is None else PythonTicket(self, ticket)

    @untraced
    def fetch(self, ticket: PythonTicket) -> _C.Bytes:
        return self._noted(ticket.inner.fetch())

    @untraced
    def prefetch(self, ticket: PythonTicket) -> _C.Bytes | None:
        began = ticket.inner.prefetch()
        return None if began is None else self._noted(began)

    @untraced
    def unload(self, ticket: PythonTicket) -> None:
        ticket.inner.unload()

    def _noted(self, made: _C.Bytes) -> _C.Bytes:
        self.buffers.append(weakref.ref(made.storage))
        return made


@contextmanager
def own_stores() -> Iterator[None]:
    """Let what is offloaded inside the block go to stores that end with it."""
    before = dict(stores._stores)
    stores._stores.clear()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        stores._stores.clear()
        stores._stores.update(before)


def offload_from(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let regions, plans and `offload_inputs` offload tensors from `nbytes` on, instead of 1 MiB."""
    for module in (session, _checkpointed_call):
        monkeypatch.setattr(module, "DEFAULT_MIN_BYTES", nbytes)


def num_spans() -> int:
    """Return how many ranges of storages the library has offloaded."""
    return _C.num_spans()
