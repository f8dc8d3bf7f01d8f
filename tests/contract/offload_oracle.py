"""What the tests of offloading share: stores to run over, a subclass of two tensors, independent byte counts."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import on_device
import torch
from oracle import assert_equal
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

import actckpt
from actckpt import _C, config
from actckpt._core import devices
from actckpt._core.torch_private import untraced
from actckpt._offload import stores
from actckpt._offload.cpu import CpuStore
from actckpt._offload.device import DeviceStore, record_streams

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
            release=partial(record_streams, accelerator),
            spill_file=file,
            bounce_bytes=0 if file is None else 16 * _BUFFER_BYTES,
            buffer_bytes=_BUFFER_BYTES,
            num_workers=max(1, num_workers),
        )
        return cls(engine, accelerator)

    def flush(self) -> None:
        """Wait until all bytes have left."""
        for index in range(self.accelerator.device_count()):
            self.accelerator.synchronize(self.accelerator.device_at(index))
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


def free_memory(h: torch.Tensor) -> None:
    """Free the memory of a tensor."""
    h.untyped_storage().resize_(0)


def free_and_fill(h: torch.Tensor) -> None:
    """Free the memory of a tensor, and fill what it gets anew: often the same address, as if nothing had happened."""
    nbytes = h.untyped_storage().nbytes()
    h.untyped_storage().resize_(0)
    h.untyped_storage().resize_(nbytes)
    h.untyped_storage().fill_(7)


def deep(x: torch.Tensor) -> torch.Tensor:
    """Save several tensors of the size of `x`, which is square."""
    return ((x * 1.5).sin().exp() @ x.cos().T).tanh().square().sum()


def live_tickets() -> int:
    """Return how many tickets the store holds."""
    store = the_store()
    assert store is not None
    return store.stats().num_live


def assert_no_ticket_is_left() -> None:
    """Assert that nothing is in the store, as where every graph is gone.

    On a device, its thread of autograd releases the last graph a little later, and a ticket whose copy was under way
    then is released at the store's next call once the copy has passed.
    """
    store = the_store()
    deadline = time.monotonic() + 60
    while isinstance(store, DeviceStore) and live_tickets() and time.monotonic() < deadline:
        time.sleep(0.001)
        store.poll()
    assert live_tickets() == 0, "every graph of the test is gone"


class PythonStore:
    """What the hooks do with a store, in Python: one that a test can change. See `stores.Store`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        #: What was allocated to be read into.
        self.buffers: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def window_bytes(self) -> int:
        return self.inner.window_bytes

    @untraced
    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        if isinstance(self.inner, DeviceStore):
            return self.inner.put(source, nbytes, must=must)
        address = source.storage.data_ptr() + source.start
        ticket = self.inner.engine.put(address, nbytes, source, must=must)
        return None if isinstance(ticket, _C.Kept) else ticket

    @untraced
    def saved_again(self, ticket: Any, device: torch.device, storage: torch.UntypedStorage) -> None:
        if isinstance(self.inner, DeviceStore):
            self.inner.saved_again(getattr(ticket, "inner", ticket), device, storage)  # tests may wrap tickets

    @untraced
    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes:
        if isinstance(self.inner, DeviceStore):
            return self._noted(self.inner.fetch(ticket, nbytes, device))
        found = ticket.get()
        while found is None:
            buffer = self._buffer(nbytes, device)
            found = ticket.load(buffer.storage.data_ptr(), buffer)
        assert isinstance(found, _C.Bytes)
        return found

    @untraced
    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes | None:
        if isinstance(self.inner, DeviceStore):
            began = self.inner.prefetch(ticket, nbytes, device)
            return None if began is None else self._noted(began)
        buffer = self._buffer(nbytes, device)
        return buffer if ticket.prefetch(buffer.storage.data_ptr(), buffer) else None

    def _buffer(self, nbytes: int, device: torch.device) -> _C.Bytes:
        return self._noted(_C.allocate_bytes(nbytes, device))

    def _noted(self, made: _C.Bytes) -> _C.Bytes:
        self.buffers.append(weakref.ref(made.storage))
        return made


def assert_same(program: Callable[[Callable[[], Any]], Any], **options: Any) -> None:
    """Run `program` plainly and under offload, from one seed: all results are bit-equal.

    The program enters the context that it is given around its forward, calls `flush` as it likes, and
    returns its gradients. It runs once with the copies as they come.
    """
    options = {"min_bytes": 0, **options}
    torch.manual_seed(7)
    expected = program(nullcontext)
    for _ in range(2):  # the second time, the order of backward is learnt
        torch.manual_seed(7)
        assert_equal(program(lambda: actckpt.offload(**options)), expected)


class TwoTensor(torch.Tensor):
    """A wrapper subclass that holds two tensors and does everything to both."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor, size: Any = None, stride: Any = None) -> Any:
        size, stride = size or a.shape, stride or a.stride()
        return torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=a.dtype, device=a.device)

    def __init__(self, a: torch.Tensor, b: torch.Tensor, size: Any = None, stride: Any = None) -> None:
        self.a, self.b = a, b

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> TwoTensor:
        return TwoTensor(inner["a"], inner["b"], size, stride)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = []
        for name in ("a", "b"):
            taken = _pytree.tree_map_only(TwoTensor, lambda t, name=name: getattr(t, name), (args, kwargs or {}))
            results.append(func(*taken[0], **taken[1]))
        if func._schema.is_mutable and isinstance(args[0], TwoTensor):
            return args[0]
        flat, spec = _pytree.tree_flatten(results[0])
        both = [
            TwoTensor(a, b) if isinstance(a, torch.Tensor) else a
            for a, b in zip(flat, _pytree.tree_leaves(results[1]), strict=True)
        ]
        return _pytree.tree_unflatten(both, spec)


def two_tensor(*shape: int) -> TwoTensor:
    """Return a random pair."""
    return TwoTensor(torch.randn(*shape), torch.randn(*shape))


def unique_saved_bytes(run: Callable[[], Any], excluded: list[torch.Tensor]) -> tuple[int, int]:
    """Return how many bytes autograd saves in `run`, each once, and the bytes of all storages behind them.

    The storages of `excluded` do not count.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    marked: dict[int, torch.Tensor] = {}
    excluded_addresses = {tensor.untyped_storage().data_ptr() for tensor in excluded}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), tensor.element_size()
        if address not in excluded_addresses and tensor.numel():
            storages[address] = storage  # held, so that no address comes twice
            marks = marked.setdefault(address, torch.zeros(storage.nbytes(), dtype=torch.bool))
            kept = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
            sizes, strides = [n for n, _ in kept], [stride for _, stride in kept]
            marks.as_strided([*sizes, size], [*strides, 1], tensor.storage_offset() * size).fill_(True)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    del result
    return sum(int(marks.sum()) for marks in marked.values()), sum(s.nbytes() for s in storages.values())
