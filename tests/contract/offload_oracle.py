"""What the tests of offloading share: a subclass of two tensors, independent byte counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from oracle import assert_equal
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree

import actckpt


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
