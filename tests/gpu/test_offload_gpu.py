"""Offloading CUDA tensors: streams and threads over every tier, no host sync in forward, lower peak.

`pytest --device cuda tests/contract/offload` runs the contract tests; `test_tiers_gpu.py` holds what the tiers promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_oracle import TIERS, assert_same_here, only
from offload_oracle import deep
from oracle import assert_equal, in_threads, mlp
from torch.autograd.graph import save_on_cpu

import actckpt

Context = Callable[[], Any]


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with only(request.param, tmp_path):
        yield request.param


def _leaf(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True, **options)


def test_forward_runs_ahead_of_the_device() -> None:
    """A forward behind a long kernel returns before the kernel has ended."""
    x = _leaf(1024, 1024)
    for _ in range(2):
        with actckpt.offload(min_bytes=0):
            deep(x)
    torch.cuda.synchronize()
    ended = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    ended.record()
    with actckpt.offload(min_bytes=0):
        y = deep(x)
    assert not ended.query(), "the host waited"
    y.backward()


def test_several_streams_save_and_read_the_same_tensors(tier: str) -> None:
    def program(context: Context) -> Any:
        x = _leaf(512, 512)
        streams = [torch.cuda.Stream() for _ in range(3)]
        with context():
            h = x * 0.1
            parts = []
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    parts.append((h.sin() @ h).exp())
                h.record_stream(stream)
            for stream, part in zip(streams, parts, strict=True):
                torch.cuda.current_stream().wait_stream(stream)
                part.record_stream(torch.cuda.current_stream())
            y = sum(part.mean() for part in parts)
        return torch.autograd.grad(y, x)

    for _ in range(5):
        assert_same_here(program)


def test_memory_is_used_again_while_copies_are_in_flight(tier: str) -> None:
    """Wrong bytes if a source is freed, or a destination written, before its time."""
    x = _leaf(1 << 20)

    def train(context: Context) -> list[torch.Tensor]:
        grads = []
        for step in range(20):
            with context():
                h = x * (1 + step)
                for _ in range(6):
                    h = h.sin() * 1.01
            grads.append(torch.autograd.grad(h.sum(), x)[0])
            torch.empty(1 << 20, device="cuda").fill_(float("nan"))
        return grads

    expected = train(nullcontext)
    for _ in range(3):
        assert_equal(train(lambda: actckpt.offload(min_bytes=0)), expected)


def test_threads_with_streams_of_their_own(tier: str) -> None:
    inputs = [torch.randn(256, 256, device="cuda") for _ in range(4)]
    expected = []
    for value in inputs:
        x = value.clone().requires_grad_()
        expected.append(torch.autograd.grad(deep(x), x)[0])
    torch.cuda.synchronize()

    def train(n: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                x = inputs[n].clone().requires_grad_()
                with actckpt.offload(min_bytes=0):
                    y = deep(x)
                (found,) = torch.autograd.grad(y, x)
            torch.cuda.current_stream().synchronize()
        return found

    assert_equal(in_threads(train, 4), expected)


def _peak_bytes(context: Context) -> int:
    model = mlp(1024, 12).cuda()
    x = torch.randn(8192, 1024, device="cuda")  # 32 MiB per tensor, 24 saved
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with context():
            y = model(x).sum()
        y.backward()
        torch.cuda.synchronize()
        model.zero_grad()
    return torch.cuda.max_memory_allocated()


def test_peak_memory_falls_and_is_within_the_windows_of_the_blocking_copies() -> None:
    plain = _peak_bytes(nullcontext)
    actckpt.configure(max_inflight="64MiB")
    found = _peak_bytes(actckpt.offload)
    blocking = _peak_bytes(lambda: save_on_cpu(pin_memory=True))
    assert found <= plain - 12 * (32 << 20)
    assert found <= blocking + (2 * 64 + 2 * 32 << 20), "both windows and one storage each way"
