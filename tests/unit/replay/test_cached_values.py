"""What a backward caches of a replay: no longer than something needs it, and within windows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import random_programs
import torch
from internals.stores import flush, store_of_kind
from oracle import assert_equal, leaf
from random_graphs import RandomGraph, count, num_replayed
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt
from actckpt import _C, _bind
from actckpt._replay import active_region

pytestmark = pytest.mark.usefixtures("no_audit", "counters_only_observe")


class _Watch:
    """What the tape of a region caches, looked at after each unpack."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cached_bytes: list[int] = []
        self.tapes: list[Any] = []
        right = active_region.unpack_recorded

        def unpack(packed: Any) -> Tensor:
            tensor = right(packed)
            self.cached_bytes.append(packed.tape.cached_bytes)
            self.tapes[:] = [packed.tape]
            return tensor

        monkeypatch.setattr(active_region, "unpack_recorded", unpack)


def test_plain_operators_in_a_row_are_replayed_without_python(request: pytest.FixtureRequest) -> None:
    x = torch.linspace(0, 1, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(_line(x), x)
    with actckpt.region():
        loss = _line(x)

    def fail(*args: object) -> Any:
        raise AssertionError(args)

    _C.connect(_bind.NAMES | {"choose_replay": fail, "replay_specially": fail, "private_memory": fail})
    request.addfinalizer(lambda: _C.connect(_bind.NAMES))
    gradients: list[Tensor] = []
    assert num_replayed(lambda: gradients.extend(torch.autograd.grad(loss, x))) >= 16
    assert torch.equal(gradients[0], expected)


def _line(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.cat([x, x.sin()]).view(2, -1).sum(0, keepdim=True).tanh().flatten() + x
    return x.exp().sum()


def test_an_intermediate_goes_with_the_saved_tensors_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of the graph is dropped while a backward goes on, which has replayed on its account."""
    watch = _Watch(monkeypatch)
    x = torch.linspace(0, 1, 64, requires_grad=True)
    with actckpt.region():
        h = x + 1
        losses = [(h * number).exp().sum() for number in (2, 3)]
    seen: list[int] = []

    def drop(grad: Tensor) -> None:
        seen.append(watch.tapes[-1].cached_bytes)
        del losses[0]
        gc.collect()
        seen.append(watch.tapes[-1].cached_bytes)

    h.register_hook(drop)
    torch.autograd.grad(losses[1], x, retain_graph=True)
    assert seen == [64 * 4, 0]


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("policy", ["recompute", ["aten.mm", "aten.mul.Tensor", "aten.native_layer_norm"]])
def test_random_programs_have_the_right_gradients_within_windows(
    mode: int, policy: Any, windows_from: Callable[[float], None]
) -> None:
    windows_from(0)
    for seed in random_programs.seeds():
        program = RandomGraph(seed)
        expected = count(program, mode, nullcontext())[0]
        found = count(program, mode, actckpt.region(policy))[0]
        for one, other in zip(found, expected, strict=True):
            assert one is other or torch.equal(one, other), seed


@pytest.mark.parametrize("window_from", [0, 1 << 20])
def test_views_of_one_offloaded_value_that_one_operator_saves_are_brought_back_once(
    window_from: int, windows_from: Callable[[float], None]
) -> None:
    """Also where what waits, here what attention returned, leaves no room for it."""
    x, w, out = leaf(2, 8, 16), leaf(16, 48), leaf(16, 16)

    def gradients(policy: Any) -> Any:
        with actckpt.region(policy):
            qkv = x @ w
            q, k, v = qkv.view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 8, 16)
            y = attended @ out
        return torch.autograd.grad(y.square().sum(), [x, w, out])

    attention = "::aten._scaled_dot_product_flash_attention_for_cpu.default#0.0"
    expected = gradients("keep")
    windows_from(window_from)
    with store_of_kind("memory"):
        for _ in range(3):
            actckpt.reset_stats()
            assert_equal(gradients({"::aten.mm.default#0.0": "offload", attention: "offload"}), expected)
            flush()
        moved = actckpt.stats()
    assert moved.reloaded_bytes == moved.offloaded_bytes == 4 * 2 * 8 * (48 + 16)
