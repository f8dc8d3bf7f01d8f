"""What the tests of offloading share: stores to run over, a subclass of two tensors, independent byte counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from oracle import assert_equal
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

import actckpt
from actckpt import _C, config
from actckpt._offload import stores
from actckpt._offload.cpu import CpuStore

KINDS = ("disk", "memory")


@contextmanager
def store_of_kind(kind: str, **options: Any) -> Iterator[CpuStore]:
    """Offload CPU tensors to a store of our own inside the block."""
    if kind == "disk":
        store = CpuStore.on_disk(config.settings().spill_folder, **options)
    else:
        store = CpuStore.in_memory(**options)
    with using(store):
        yield store


@contextmanager
def using(store: Any) -> Iterator[None]:
    """Offload CPU tensors to `store` inside the block."""
    before = dict(stores._stores)
    stores._stores["cpu"] = config.generation, store
    try:
        yield
    finally:
        stores._stores.clear()
        stores._stores.update(before)


def flush() -> None:
    """Wait until every byte has left, so that backward must bring it back."""
    store = stores.cpu_store()
    if store is not None:
        store.flush()
        store.poll()


def deep(x: torch.Tensor) -> torch.Tensor:
    """Save several tensors of the size of `x`, which is square."""
    return ((x * 1.5).sin().exp() @ x.cos().T).tanh().square().sum()


def live_tickets() -> int:
    """Return how many tickets the store holds."""
    store = stores.cpu_store()
    assert store is not None
    return store.stats().num_live


class PythonStore:
    """What the hooks do with a store of the CPU, in Python: one that a test can change. See `stores.Store`."""

    def __init__(self, inner: CpuStore) -> None:
        self.inner = inner
        #: What was allocated to be read into.
        self.buffers: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def window_bytes(self) -> int:
        return self.inner.window_bytes

    def put(self, source: _C.Bytes, nbytes: int, *, must: bool = True) -> Any | None:
        address = source.storage.data_ptr() + source.start
        ticket = self.inner.engine.put(address, nbytes, self.inner.tier, source, must=must)
        return None if isinstance(ticket, _C.Kept) else ticket

    def saved_again(self, ticket: Any, device: torch.device, storage: torch.UntypedStorage) -> None:
        pass

    def fetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes:
        found = ticket.get()
        while found is None:
            buffer = self._buffer(nbytes, device)
            found = ticket.load(buffer.storage.data_ptr(), buffer)
        assert isinstance(found, _C.Bytes)
        return found

    def prefetch(self, ticket: Any, nbytes: int, device: torch.device) -> _C.Bytes | None:
        buffer = self._buffer(nbytes, device)
        return buffer if ticket.prefetch(buffer.storage.data_ptr(), buffer) else None

    def _buffer(self, nbytes: int, device: torch.device) -> _C.Bytes:
        made = _C.allocate_bytes(nbytes, device)
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
