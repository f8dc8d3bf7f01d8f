"""What does offloading a small CPU tensor cost beyond the copy? Microseconds per put and get.

64 operators each save one tensor of 4 KiB; each is packed and unpacked under `offload(min_bytes=0)` over a spill
file in memory (tmpfs), beside `torch.autograd.graph.save_on_cpu` and hooks that copy, in the same run. Run with
`python -m pytest benchmarks/test_offload_small.py`; prints medians per saved tensor.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import actckpt
from actckpt import config
from actckpt._offload import stores
from actckpt._offload.cpu import CpuStore

_TENSORS = 64  # per step
_SAMPLES = 400  # of one step each, about a millisecond: on a busy machine most of them are not interrupted
_LIMIT_US = 30.0  # two system calls and two checksums among it

Context = Callable[[], AbstractContextManager[Any]]


def _copy_out_and_back() -> AbstractContextManager[Any]:
    """Two copies in Python and nothing else: the yardstick."""
    return saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor.clone())


_METHODS: dict[str, Context] = {
    "plain": contextlib.nullcontext,
    "two copies": _copy_out_and_back,
    "save_on_cpu": save_on_cpu,
    "actckpt": lambda: actckpt.offload(min_bytes=0),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def _store_in_memory(num_workers: int) -> Iterator[None]:
    before = dict(stores._stores)
    store = CpuStore.on_disk("/dev/shm", num_workers=num_workers)
    stores._stores["cpu"] = config.generation, store
    try:
        yield
    finally:
        stores._stores.clear()
        stores._stores.update(before)


def _step_function(context: Context) -> Callable[[], None]:
    inputs = [torch.randn(1024, requires_grad=True) * 1 for _ in range(_TENSORS)]
    store = stores.cpu_store()
    assert store is not None

    def step() -> None:
        with context():
            outputs = [tensor.sin() for tensor in inputs]  # each saves its input
        store.flush()  # so that every byte must come back
        for output in outputs:
            output.grad_fn._saved_self  # noqa: B018 - the unpack
        outputs.clear()

    return step


@pytest.mark.parametrize("num_workers", [0, 2])
def test_microseconds_per_saved_tensor(num_workers: int, benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with _store_in_memory(num_workers):
        steps = {name: _step_function(context) for name, context in _METHODS.items()}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            for _ in range(10):
                step()
        for _ in range(_SAMPLES):  # interleaved: the machine's speed drifts
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                samples[name].append((time.perf_counter() - start) / _TENSORS)
        medians_us = {name: statistics.median(values) * 1e6 for name, values in samples.items()}
        benchmark.pedantic(steps["actckpt"], rounds=20, iterations=1)
    beyond_us = {name: medians_us[name] - medians_us["two copies"] for name in ("save_on_cpu", "actckpt")}
    benchmark.extra_info.update(
        num_workers=num_workers, tensor_bytes=4096, medians_us=medians_us, beyond_copies_us=beyond_us
    )
    with capsys.disabled():
        parts = [f"{name} {value:.1f} us" for name, value in medians_us.items()]
        print(f"\n{num_workers} workers, per saved tensor of 4 KiB: {', '.join(parts)}")
        print(f"beyond two copies: {', '.join(f'{name} {value:.1f} us' for name, value in beyond_us.items())}")
    assert beyond_us["actckpt"] < _LIMIT_US
