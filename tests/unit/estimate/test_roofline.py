"""Seconds and floating-point operations of single operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from actckpt._estimate import roofline
from actckpt._estimate.roofline import Clock
from actckpt._estimate.targets import Target

#: 1000 operations per second on 16-bit numbers, 100 on 32-bit ones, 10 bytes per second; of a CPU all of them.
_CPU, _GPU = (Target(name, 1000.0, 100.0, 10.0, 1.0, 1) for name in ("cpu", "slow"))


def _clock(function: Callable[[], object], target: Target = _CPU) -> Clock:
    with Clock(target) as clock:
        function()
    return clock


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


A, B = _ones(8, 16), _ones(16, 4)
HALF = _ones(8, 16, dtype=torch.bfloat16)
WIDE, WIDER = _ones(64, 64), _ones(128, 128)
TABLE, NUMBERS = _ones(1000, 4), torch.arange(3)


@pytest.mark.parametrize(
    ("function", "seconds"),
    [
        (lambda: A @ B, 4 * (8 * 16 + 16 * 4 + 8 * 4) / 10),  # bytes: 89.6 s, operations: 10.24 s
        (lambda: WIDE @ WIDE, 2 * 64**3 / 100),  # operations: 5242.88 s, bytes: 4915.2 s
        (lambda: A + A, 3 * 4 * 8 * 16 / 10),
        (lambda: HALF + HALF, 3 * 2 * 8 * 16 / 10),
        (lambda: A + A[:, :1].expand(8, 16), 4 * (2 * 8 * 16 + 8) / 10),
        (lambda: A.t().view(16, 8)[1:].unsqueeze(0).detach(), 0.0),
        (lambda: torch.empty(100), 0.0),
        (lambda: torch.zeros(100), 400 / 10),
        (lambda: A.clone().zero_(), 4 * 3 * 8 * 16 / 10),
        (lambda: torch._foreach_add_([A.clone()], [A]), 4 * (2 + 3) * 8 * 16 / 10),
        (lambda: functional.embedding(NUMBERS, TABLE), (2 * 3 * 4 * 4 + 3 * 8) / 10),
    ],
)
def test_a_kernel_takes_the_longer_of_operations_and_bytes(function: Callable[[], object], seconds: float) -> None:
    clock = _clock(function)
    assert clock.busy_seconds == pytest.approx(seconds)
    assert clock.seconds == clock.busy_seconds and clock.stall_seconds == 0


def test_operations_of_products_attention_and_their_backward_are_counted() -> None:
    q = torch.ones(2, 3, 32, 8, requires_grad=True)
    attention = functional.scaled_dot_product_attention
    full = 2 * 2 * 2 * 3 * 32 * 32 * 8
    assert _clock(lambda: attention(q, q, q)).flops == full
    assert _clock(lambda: attention(q, q, q, is_causal=True)).flops == full // 2
    assert _clock(lambda: attention(q, q, q).sum().backward()).flops == full + full * 5 // 2
    assert _clock(lambda: attention(q, q, q, is_causal=True).sum().backward()).flops == (full + full * 5 // 2) // 2
    linear, x = torch.nn.Linear(16, 4), torch.ones(8, 16, requires_grad=True)
    assert _clock(lambda: linear(x).sum().backward()).flops == 3 * 2 * 8 * 16 * 4


def test_products_of_32_bit_numbers_are_faster_where_tf32_is_allowed() -> None:
    reached = roofline._REACHED
    before = _clock(lambda: WIDER @ WIDER, _GPU).busy_seconds
    names = [("generic", "all"), *itertools.product(("mkldnn", "cuda"), ("all", "matmul", "conv", "rnn"))]
    settings = [(*name, torch._C._get_fp32_precision_getter(*name)) for name in names]
    try:
        torch.set_float32_matmul_precision("high")
        after = _clock(lambda: WIDER @ WIDER, _GPU).busy_seconds
    finally:
        torch.set_float32_matmul_precision("highest")
        for setting in settings:  # which is not what was there before: "none"
            torch._C._set_fp32_precision_setter(*setting)
    assert before == pytest.approx(2 * 128**3 / (100 * reached.products))
    # No longer the operations, but the bytes.
    assert after == pytest.approx(3 * 4 * 128 * 128 / (10 * reached.bytes))


def test_kernels_of_gpus_reach_a_share_of_the_peaks() -> None:
    reached = roofline._REACHED
    q = torch.ones(1, 1, 512, 64, requires_grad=True)
    scores = 2 * 2 * 512 * 512 * 64
    assert _clock(lambda: A + A, _GPU).busy_seconds == pytest.approx(3 * 4 * 8 * 16 / (10 * reached.bytes))
    attention = functional.scaled_dot_product_attention
    forward = _clock(lambda: attention(q, q, q), _GPU).busy_seconds
    assert forward == pytest.approx(scores / (100 * reached.attention))
    out = attention(q, q, q)
    backward = _clock(lambda: torch.autograd.grad(out, q, torch.ones_like(out)), _GPU)
    kernel = 2.5 * scores / (100 * reached.attention_backward)
    assert kernel < backward.busy_seconds < 1.1 * kernel
    assert all(0 < share < 1 for share in reached)


def test_waiting_counts_apart() -> None:
    clock = Clock(_CPU)
    clock.busy_seconds = 3.0
    clock.wait_until(5.0)
    clock.wait_until(4.0)
    assert (clock.seconds, clock.stall_seconds) == (5.0, 2.0)
