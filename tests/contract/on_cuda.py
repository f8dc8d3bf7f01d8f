"""The suite on a GPU: `pytest --device cuda`. Results are compared bit by bit, so kernels must be deterministic."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

__all__ = ["EXPECTED_WARNINGS", "deterministic", "memory_of"]

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts; deterministic products need it

#: Warnings are errors in tests; these of torch are about the device, or about how we look at it.
EXPECTED_WARNINGS = (
    "ignore:.*deterministic",  # operators that have no such form: tests compare those with themselves first
    "ignore:.*Synchronization debug mode is a prototype",
    "ignore:.*AccumulateGrad node's stream does not match",
    "ignore:.*there was no current CUDA context",  # a thread whose first operator is a product
    "ignore:TensorFloat32 tensor cores",  # the compiler would have us use them
    "ignore:Called record_stream on tensor whose original creation stream",  # cudaMallocAsync, where it has no effect
    "ignore:`torch.jit:DeprecationWarning",  # torch's compiler imports what uses it
)


@contextmanager
def deterministic() -> Iterator[None]:
    """Let results be comparable bit by bit; `empty` stays empty, as in training."""
    matmul, fill = torch.backends.cuda.matmul, torch.utils.deterministic
    before = matmul.allow_tf32, fill.fill_uninitialized_memory
    matmul.allow_tf32 = fill.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        matmul.allow_tf32, fill.fill_uninitialized_memory = before
        torch.cuda.synchronize()  # what went wrong on the device fails the test that did it


class _Copied(numpy.ndarray):
    """A copy of memory of the device, which is written back where it is written to."""

    address = 0
    host: Any = None

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        _driver("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), self.host, ctypes.c_size_t(len(self.host)))


def _driver(name: str, *args: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    assert status == 0, f"{name} returned {status}"


def memory_of(tensor: torch.Tensor) -> Any:
    """Return the bytes of a tensor as an array of NumPy, for what a kernel does that torch knows nothing of."""
    itemsize, storage = tensor.element_size(), tensor.untyped_storage()
    host = (ctypes.c_byte * storage.nbytes())()
    _driver("cuMemcpyDtoH_v2", host, ctypes.c_uint64(storage.data_ptr()), ctypes.c_size_t(len(host)))
    dtype = torch.empty(0, dtype=tensor.dtype, device="cpu").numpy().dtype
    strides = tuple(stride * itemsize for stride in tensor.stride())
    made = numpy.ndarray(tuple(tensor.shape), dtype, host, tensor.storage_offset() * itemsize, strides).view(_Copied)
    made.address, made.host = storage.data_ptr(), host
    return made
