"""Gradients are plain autograd's where settings that change numbers are others in backward than in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal, in_region, in_threads
from settings_seen import CHANGES_SETTINGS
from torch import Tensor
from torch_settings import RESTORED, call

import actckpt

pytestmark = CHANGES_SETTINGS


def _integers(w: Tensor) -> Tensor:
    return w * (torch.arange(5, dtype=torch.int8) * 0.5) + w * torch.arange(5).sin() + torch.full((5,), 0.1) * w


def _factory(w: Tensor) -> Tensor:
    return (w * torch.ones(5) / 3).sin() * torch.linspace(0, 1, 5) * torch.arange(0.0, 1.0, 0.2).exp()


def _tiny(w: Tensor) -> Tensor:
    return (w * 1e-39 * 0.3) * 1e38


def _matmul(w: Tensor) -> Tensor:
    h = torch.linspace(-1, 1, 64 * 64).view(64, 64) * w.sum()
    return ((h @ h).tanh() @ h).sin().sum() * w


def _convolution(w: Tensor) -> Tensor:
    torch.manual_seed(1)
    h = torch.nn.functional.conv2d(torch.randn(2, 8, 16, 16) * w.sum(), torch.randn(8, 8, 3, 3))
    return torch.nn.functional.gelu(h).sum() * w


def _reduction(w: Tensor) -> Tensor:
    h = torch.linspace(-1, 1, 1 << 20) * w.sum()
    return (h.sin().sum() * h.exp().norm()).tanh() * w


def _ends(w: Tensor) -> Tensor:
    """The last elements of each thread's part have other bits than elements in vectors."""
    torch.manual_seed(0)
    h = torch.nn.functional.silu(torch.randn(444 * 168 + 1) * w.sum())
    return (h * h.sin()).sum() * w


def _recurrent(w: Tensor) -> Tensor:
    torch.manual_seed(2)
    lstm = torch.nn.LSTM(8, 8)
    return lstm(torch.randn(4, 2, 8) * w.sum())[0].sum() * w


PROGRAMS: dict[str, tuple[Any, list[tuple[Callable[[], None], Callable[[], None]]]]] = {
    "default dtype": (
        _integers,
        [
            (call(torch.set_default_dtype, a), call(torch.set_default_dtype, b))
            for a, b in [
                (torch.bfloat16, torch.float16),
                (torch.float32, torch.float64),
                (torch.float64, torch.bfloat16),
            ]
        ],
    ),
    "factories": (_factory, [RESTORED["torch.set_default_dtype"], RESTORED["torch.set_default_tensor_type"][::-1]]),
    "denormals": (_tiny, [RESTORED["torch.set_flush_denormal"], RESTORED["torch.set_flush_denormal"][::-1]]),
    "matmul": (
        _matmul,
        [
            RESTORED["torch.set_float32_matmul_precision"],
            RESTORED["torch.set_float32_matmul_precision"][::-1],
            RESTORED["torch.backends.mkldnn.matmul.fp32_precision"],
            RESTORED["torch.backends.mkldnn.enabled"],
            RESTORED["torch.backends.mkldnn.flags"],
        ],
    ),
    "convolution": (
        _convolution,
        [
            RESTORED["torch.backends.mkldnn.enabled"],
            RESTORED["torch.backends.mkldnn.flags"],
            RESTORED["torch.backends.mkldnn.conv.fp32_precision"],
        ],
    ),
    "reduction": (_reduction, [RESTORED["torch.set_num_threads"], RESTORED["torch.set_num_threads"][::-1]]),
    "elements": (_ends, [RESTORED["torch.set_num_threads"], RESTORED["torch.set_num_threads"][::-1]]),
    "recurrent": (
        _recurrent,
        [
            RESTORED["torch.backends.mkldnn.enabled"],
            RESTORED["torch.backends.mkldnn.rnn.fp32_precision"],
        ],
    ),
}


_METHODS = {
    "checkpoint": actckpt.checkpoint,
    "region": in_region("recompute"),
    "list": in_region([torch.ops.aten.mm.default, torch.ops.aten.convolution.default]),
}


@pytest.mark.parametrize("method", _METHODS)
@pytest.mark.parametrize("audit", ["first", "off"])
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, cases) in PROGRAMS.items() for case in range(len(cases))]
)
def test_gradients_are_plain_ones_where_settings_changed_before_backward(
    name: str, case: int, method: str, audit: str
) -> None:
    program, cases = PROGRAMS[name]
    for_forward, for_backward = cases[case]
    actckpt.configure(audit=audit)

    def gradient(run: Any) -> Tensor:
        w = torch.linspace(0.5, 1.5, 5, dtype=torch.float32, requires_grad=True)
        for_forward()
        y = run(program, w)
        for_backward()
        return torch.autograd.grad(y, w, torch.ones_like(y))[0]

    expected = gradient(lambda function, w: function(w))
    assert_equal(gradient(_METHODS[method]), expected)


@pytest.mark.parametrize("audit", ["first", "off"])
def test_a_setting_for_one_layer_within_a_region_is_that_of_its_replay(audit: str) -> None:
    actckpt.configure(audit=audit)

    def program(w: Tensor) -> Tensor:
        y = _convolution(w)
        with torch.backends.mkldnn.flags(enabled=False):
            y = y * _convolution(w)
        torch.set_default_dtype(torch.float64)
        try:
            y = y * _integers(w)
        finally:
            torch.set_default_dtype(torch.float32)
        return y

    def gradient(run: Any) -> Tensor:
        w = torch.linspace(0.5, 1.5, 5, requires_grad=True)
        return torch.autograd.grad(run(program, w).sum(), w)[0]

    expected = gradient(lambda function, w: function(w))
    for method in _METHODS.values():
        assert_equal(gradient(method), expected)


def test_two_threads_that_restore_settings_leave_them_as_they_were() -> None:
    w = torch.randn(3, requires_grad=True)

    def forward() -> Tensor:
        y = w
        for _ in range(50):
            y = y * (torch.arange(3) * 0.5).sin().to(torch.float32)
        return y

    results, expected = [], []
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        expected.append(torch.autograd.grad(forward(), w, torch.ones(3))[0])
        results.append(_METHODS["region"](lambda w: forward(), w))
    torch.set_default_dtype(torch.float32)
    assert not torch.equal(*expected)
    found = in_threads(lambda index: torch.autograd.grad(results[index], w, torch.ones(3))[0], 2)
    assert torch.get_default_dtype() is torch.float32
    assert_equal(found, expected)
