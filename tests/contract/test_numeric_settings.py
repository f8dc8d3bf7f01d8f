"""Reruns and replayed operators find the settings that change numbers as the forward did, and gradients are plain."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from oracle import assert_equal, in_region, in_threads, plain
from settings_seen import (
    CHANGES_SETTINGS,
    READ_ABOVE,
    READ_BY_CODE,
    assert_same,
    everything,
    fails_from_call,
    flushes,
    found,
    look,
    seen,
)
from torch import Tensor
from torch_settings import CANNOT_CHANGE, IRRELEVANT, RESTORED, RESTORED_FOR_RERUNS, Pair, all_public_names, call

import actckpt

pytestmark = CHANGES_SETTINGS


def test_every_public_setter_of_torch_is_classed() -> None:
    classed = IRRELEVANT.keys() | RESTORED.keys() | RESTORED_FOR_RERUNS.keys()
    unknown = all_public_names() - classed
    assert sorted(unknown) == [], (
        "does it change numbers? Restore it in actckpt/_core/numerics.py, or say above why not"
    )


_OF_2_13 = pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch 2.13 brought some of the settings")


def _is_here(name: str) -> bool:
    try:
        eval(name, {"torch": torch})
    except AttributeError:
        return False
    return True


def _each(names: Iterable[str]) -> list[Any]:
    """Return names of settings to run a test with; those that this torch does not have are skipped."""
    of_later = pytest.mark.skip(reason=f"torch {torch.__version__} has no such setting; 2.13 has all")
    return [name if _is_here(name) else pytest.param(name, marks=of_later) for name in names]


@_OF_2_13
def test_nothing_is_classed_that_torch_does_not_have() -> None:
    optional = {"torch.backends.cudnn.benchmark_limit", "torch.set_vital"}  # with a GPU; in older versions
    elsewhere = {"torch.nn.attention.sdpa_kernel", "torch.utils.deterministic.fill_uninitialized_memory"}
    classed = IRRELEVANT.keys() | RESTORED.keys() | RESTORED_FOR_RERUNS.keys()
    assert sorted(classed - all_public_names() - optional - elsewhere) == []


@_OF_2_13
def test_nothing_is_read_that_torch_does_not_have() -> None:
    assert [name for name, value in everything().items() if value == "missing"] == []


@pytest.mark.parametrize("name", _each(RESTORED))
def test_a_replayed_operator_finds_settings_that_were_in_force_for_a_part_of_its_region(name: str) -> None:
    for_forward, for_backward = RESTORED[name]
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    with actckpt.region():
        y = w * look(t)
        for_forward()
        y = y + w * look(t)
        for_backward()
        y = y * look(t)
    outside = everything()
    assert not seen[0] == seen[1] == seen[2] or name in CANNOT_CHANGE
    torch.autograd.grad(y, w, torch.ones(3))
    assert everything() == outside
    for settings, expected in zip(seen[3:], seen[2::-1], strict=True):  # backward begins with the last one
        assert_same(settings, expected)


@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.parametrize("name", _each(RESTORED | RESTORED_FOR_RERUNS))
def test_a_rerun_finds_the_settings_of_its_forward(name: str, kind: str) -> None:
    for_forward, for_backward = (RESTORED | RESTORED_FOR_RERUNS)[name]

    class Looks(torch.nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            seen_above.append({name: READ_ABOVE[name]() for name in READ_BY_CODE})
            return (w * look(t)).sin()

    seen_above: list[dict[str, Any]] = []
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    module = Looks()
    for_forward()
    y = actckpt.checkpoint(module if kind == "module" else lambda w: module(w), w)
    for_backward()
    outside = everything()
    by_code = {name: outside[name] for name in READ_BY_CODE}
    assert found() != seen[0] or by_code != seen_above[0] or name in CANNOT_CHANGE
    torch.autograd.grad(y, w, torch.ones(3))
    assert everything() == outside
    assert len(seen) == 2
    assert_same(seen[1], seen[0])
    assert len(seen_above) == 2 and seen_above[0] == seen_above[1]


_SEVERAL = [
    "torch.set_default_dtype",
    "torch.set_flush_denormal",
    "torch.set_float32_matmul_precision",
    "torch.use_deterministic_algorithms",
    "torch.nn.attention.sdpa_kernel",
    "torch.backends.cudnn.allow_tf32",
]


@pytest.mark.parametrize("kind", ["rerun", "replay"])
def test_settings_are_put_back_after_an_error(kind: str) -> None:
    fails_from_call[0] = 1
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    fail = torch.ops.settings_seen.fail
    for name in _SEVERAL:
        RESTORED[name][0]()
    if kind == "rerun":
        y = actckpt.checkpoint(lambda w: w * fail(t, []), w)
    else:
        with actckpt.region():
            y = w * fail(t, [])
    for name in _SEVERAL:
        RESTORED[name][1]()
    outside = everything()
    with pytest.raises(ValueError, match="this kernel fails"):
        torch.autograd.grad(y, w, torch.ones(3))
    assert len(seen) == 2 and seen[0] != found()
    assert_same(seen[1], seen[0])
    assert everything() == outside


def test_settings_of_a_thread_are_those_of_the_forward_where_backward_runs_in_another_one() -> None:
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    torch.set_flush_denormal(True)
    with actckpt.region():
        y = w * look(t)
    z = actckpt.checkpoint(lambda w: w * look(t), w)
    left: list[bool] = []

    def backward() -> None:
        torch.set_flush_denormal(False)
        torch.autograd.grad(y, w, torch.ones(3))
        torch.autograd.grad(z, w, torch.ones(3))
        left.append(flushes())

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert left == [False] and flushes()
    assert [settings["denormals"] for settings in seen] == [True] * 4


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


def _layers_of_other_settings(w: Tensor) -> Tensor:
    y = _convolution(w)
    with torch.backends.mkldnn.flags(enabled=False):
        y = y * _convolution(w)
    torch.set_default_dtype(torch.float64)
    y = y * _integers(w)
    torch.set_default_dtype(torch.float32)
    return y


def _pair(name: str) -> Pair:
    return RESTORED[f"torch.{name}"]


def _both_ways(name: str) -> list[Pair]:
    return [_pair(name), _pair(name)[::-1]]


_ONEDNN = [_pair("backends.mkldnn.enabled"), _pair("backends.mkldnn.flags")]
_DTYPES = [(torch.bfloat16, torch.float16), (torch.float32, torch.float64), (torch.float64, torch.bfloat16)]
#: Programs, and what sets their settings for the forward and for the backward.
PROGRAMS: dict[str, tuple[Any, list[Pair]]] = {
    "default dtype": (_integers, [tuple(call(torch.set_default_dtype, dtype) for dtype in both) for both in _DTYPES]),
    "factories": (_factory, [_pair("set_default_dtype"), _pair("set_default_tensor_type")[::-1]]),
    "denormals": (_tiny, _both_ways("set_flush_denormal")),
    "matmul": (
        _matmul,
        [*_both_ways("set_float32_matmul_precision"), _pair("backends.mkldnn.matmul.fp32_precision"), *_ONEDNN],
    ),
    "convolution": (_convolution, [*_ONEDNN, _pair("backends.mkldnn.conv.fp32_precision")]),
    "reduction": (_reduction, _both_ways("set_num_threads")),
    "elements": (_ends, _both_ways("set_num_threads")),
    "layers of other settings": (_layers_of_other_settings, [(lambda: None, lambda: None)]),
    "recurrent": (_recurrent, [_pair("backends.mkldnn.enabled"), _pair("backends.mkldnn.rnn.fp32_precision")]),
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

    expected = gradient(plain)
    assert_equal(gradient(_METHODS[method]), expected)


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
