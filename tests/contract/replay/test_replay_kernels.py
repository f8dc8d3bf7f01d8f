"""Operators that are easy to replay wrongly: each in a region, bit-equal to plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import CountOperators, assert_equal
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name
from torch.nn.attention import SDPBackend, sdpa_kernel

import actckpt

POLICIES = ["recompute", "offload", ["aten.mm"], lambda info: list(actckpt.Action)[info.nbytes // 4 % 3]]
with_policies = pytest.mark.parametrize("policy", POLICIES, ids=["recompute", "offload", "list", "values"])


def _assert_as_plain(program: Callable[[Tensor, Any], Tensor], policy: Any, **options: Any) -> None:
    """Compare the result, its gradient and the random state after it."""
    found = []
    for region in (nullcontext, lambda: actckpt.region(policy)):
        torch.manual_seed(5)
        x = torch.randn(4, 8, **options).requires_grad_()
        y = program(x, region)
        found.append((y.detach(), torch.autograd.grad(y.abs().sum(), x), torch.get_rng_state()))
    assert_equal(found[1], found[0])


@with_policies
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_with_dropout(policy: Any, dropout: float, backend: SDPBackend) -> None:
    if backend is SDPBackend.FLASH_ATTENTION and dropout:
        backend = SDPBackend.MATH  # the flash kernel of CPUs has no dropout

    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            q, k, v = (x.view(1, 2, 4, 4) * scale for scale in (1, 2, 3))
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).sin()

    _assert_as_plain(program, policy)


def test_rule_9_replay_does_not_look_at_the_sdpa_backend_of_the_day() -> None:
    def program(x: Tensor, region: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH), region():
            q = x.view(1, 2, 4, 4)
            y = F.scaled_dot_product_attention(q * 2, q * 3, q, dropout_p=0.5)
            return y.sin() * y

    _assert_as_plain(program, "recompute")


@with_policies
def test_autocast_to_bfloat16(policy: Any) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))

    def program(x: Tensor, region: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), region():
            return layers(layers(x)).float()

    _assert_as_plain(program, policy)


def test_a_bfloat16_cast_of_a_weight_is_replayed_and_not_kept() -> None:
    layer = torch.nn.Linear(256, 256, bias=False)
    x = torch.randn(4, 256, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), actckpt.region(["aten.mm"]) as r:
        y = layer(x).sin().float()
    casts = [row for row in r.report().as_dict()["rows"] if row["operator"] == "aten._to_copy.default"]
    assert sum(row["kept_bytes"] for row in casts) == 0
    with CountOperators() as counted:
        y.sum().backward()
    assert counted.counts["aten._to_copy.default"] >= 2  # the weight's, and those of backward


@with_policies
@pytest.mark.parametrize("inside", [torch.bfloat16, None])
def test_rule_9_backward_under_another_autocast_state(policy: Any, inside: torch.dtype | None) -> None:
    weight = torch.randn(8, 8)
    found = []
    for region in (nullcontext, lambda: actckpt.region(policy)):
        torch.manual_seed(5)
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", inside, enabled=inside is not None), region():
            y = ((x @ weight).tanh() @ weight).exp().sin()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside is None):
            found.append((y.detach(), torch.autograd.grad(y.float().sum(), x)))
    assert_equal(found[1], found[0])


@with_policies
def test_complex_numbers_with_conjugate_and_negative_views(policy: Any) -> None:
    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            y = (x * x).conj()
            z = y.imag * x.real + y.conj().imag.sin()
            w = (y.mH @ x.sin()).tanh()
            return torch.fft.fft(w).abs().sum() + (z.exp() * x.angle()).sum() + y.real.cos().sum()

    _assert_as_plain(program, policy, dtype=torch.complex64)


@with_policies
def test_foreach_operators_in_and_out_of_place(policy: Any) -> None:
    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            a, b = x.sin(), x.cos()
            c, d = torch._foreach_mul([a, b], [b, a])
            torch._foreach_add_([c, d], [a, b])
            e, f = torch._foreach_exp([c, d])
            g, h = e.clone(), f * 2
            torch._foreach_mul_([g, h], 0.5)
            return (g * h * e).tanh() + torch._foreach_tanh([e])[0]

    _assert_as_plain(program, policy)


@torch.library.custom_op("actckpt_test::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draw random numbers without telling anybody."""
    return x * torch.rand(x.shape)


@torch.library.custom_op("actckpt_test::shift", mutates_args=("x",))
def shift(x: Tensor) -> None:
    """Change an argument."""
    x.add_(1)


noisy.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@with_policies
def test_rule_3_a_custom_operator_that_draws_without_a_tag(policy: Any) -> None:
    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            return (noisy(x).sin() * F.dropout(noisy(x * 2), 0.5)).exp()

    _assert_as_plain(program, policy)


@with_policies
def test_rule_1_a_custom_operator_that_changes_its_argument(policy: Any) -> None:
    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            mask = x.detach() * 2
            y = x * mask.sin()
            shift(mask)
            return y.sin() * mask.cos() * x

    _assert_as_plain(program, policy)


def test_rule_3_dropout_is_replayed_while_another_thread_draws() -> None:
    import threading

    stop = threading.Event()
    own = torch.Generator().manual_seed(11)
    drawn: list[Tensor] = []

    def draw() -> None:
        while not stop.is_set():
            drawn.append(torch.rand(3, generator=own))

    def program(x: Tensor, region: Any) -> Tensor:
        with region():
            for _ in range(20):
                x = F.dropout(x, 0.2).sin() + torch.rand(8)
            return x

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        _assert_as_plain(program, "recompute")
    finally:
        stop.set()
        thread.join()
    again = torch.Generator().manual_seed(11)
    assert_equal(drawn[:100], [torch.rand(3, generator=again) for _ in drawn[:100]])


@with_policies
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_torch_func_inside_a_region(policy: Any, transform: str) -> None:
    def program(x: Tensor, region: Any) -> Tensor:
        weight = x.sum(0)
        with region():
            if transform == "vmap":
                return torch.vmap(lambda row: (row * weight).sin().exp())(x) * x.tanh()
            return torch.func.jvp(lambda t: t.sin() * weight, (x,), (x.cos(),))[1].exp()

    _assert_as_plain(program, policy)


def test_torch_func_grad_inside_a_region_raises_the_error_of_torch() -> None:
    with actckpt.region(), pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        torch.func.grad(lambda t: (t * t.sin()).sum())(torch.randn(3))
    x = torch.randn(3, requires_grad=True)
    with actckpt.region():  # the thread is as it was
        y = x.sin().exp()
    assert_equal(torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.sin().exp().sum(), x))
