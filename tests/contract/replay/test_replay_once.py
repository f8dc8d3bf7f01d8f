"""What several dropped values are made from is replayed once in a backward, and stays no longer than one needs it."""

from __future__ import annotations

import gc
import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import random_programs
import torch
from offload_oracle import flush, store_of_kind
from oracle import CountOperators, assert_equal, leaf
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt
from actckpt import _C, _bind
from actckpt._replay import active_region
from actckpt.memory import LiveStorages

pytestmark = pytest.mark.usefixtures("no_audit")


def _chain(x: Tensor, n: int) -> Tensor:
    """Return a loss that saves n values, each made from one of n that are not saved."""
    loss = x.new_zeros(())
    for _ in range(n):
        x = x + 0.01
        loss = loss + x.exp().sum()
    return loss


def _num_replayed(run: Callable[[], object]) -> int:
    actckpt.reset_stats()
    run()
    return actckpt.stats().replayed_operators


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


@pytest.mark.parametrize("n", [2, 16, 128])
def test_a_chain_whose_values_each_feed_a_saved_one_is_replayed_once(n: int) -> None:
    x = torch.linspace(0, 1, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(_chain(x, n), x)
    with actckpt.region():
        loss = _chain(x, n)
    gradients: list[Tensor] = []
    assert _num_replayed(lambda: gradients.extend(torch.autograd.grad(loss, x))) <= 2 * n
    assert torch.equal(gradients[0], expected)


def _line(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.cat([x, x.sin()]).view(2, -1).sum(0, keepdim=True).tanh().flatten() + x
    return x.exp().sum()


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
    assert _num_replayed(lambda: gradients.extend(torch.autograd.grad(loss, x))) >= 16
    assert torch.equal(gradients[0], expected)


def _gates() -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 64, requires_grad=True)
    i, f, g, o = (x @ w).chunk(4, dim=1)
    y = i.sigmoid() * g.tanh() + f.sigmoid() * o.sigmoid()
    return y.sum(), [x, w]


def test_a_projection_that_is_cut_into_gates_is_replayed_once() -> None:
    loss, leaves = _gates()
    expected = torch.autograd.grad(loss, leaves)
    with actckpt.region():
        loss, leaves = _gates()
    with CountOperators() as operators:
        found = torch.autograd.grad(loss, leaves)
    assert operators.counts["aten.mm.default"] == 3  # one replayed, two of the gradient
    assert all(map(torch.equal, found, expected))


def test_a_value_that_is_saved_three_times_is_replayed_once() -> None:
    x, w = torch.randn(4, 4), [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    with actckpt.region():
        h = x.sin()
        loss = sum(((h @ weight).sum() for weight in w), torch.zeros(()))
    assert _num_replayed(lambda: torch.autograd.grad(loss, w)) == 1


def test_an_offloaded_value_that_several_are_replayed_from_is_brought_back_once() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def forward() -> Tensor:
        h = x @ w
        return (h.exp() + h.sigmoid() + h.tanh()).sum() + h.square().mean()

    expected = torch.autograd.grad(forward(), [x, w])
    actckpt.reset_stats()
    with actckpt.region(actckpt.policies.PerOp({"aten.mm": "offload"}, default="recompute")):
        loss = forward()
    found = torch.autograd.grad(loss, [x, w])
    assert all(map(torch.equal, found, expected))
    assert actckpt.stats().reloaded_bytes == actckpt.stats().offloaded_bytes == 64 * 64 * 4


def test_an_intermediate_goes_with_the_last_value_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _Watch(monkeypatch)
    n, nbytes = 32, 64 * 4
    x = torch.linspace(0, 1, 64, requires_grad=True)
    with actckpt.region():
        loss = _chain(x, n)
    for _ in range(2):  # with the graph retained, nothing dies
        watch.cached_bytes.clear()
        torch.autograd.grad(loss, x, retain_graph=True)
        assert watch.cached_bytes == [nbytes * left for left in range(n - 1, -1, -1)]
    torch.autograd.grad(loss, x)
    assert watch.cached_bytes[n:] == watch.cached_bytes[:n]


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


class _Program:
    """A random graph of operators: branches, several results, in place, random, cut into pieces."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        torch.manual_seed(seed)
        self.leaves = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]

    def forward(self) -> list[Tensor]:
        """Return some results that require grad."""
        rng = random.Random(self._seed)
        torch.manual_seed(self._seed)
        pool: list[Tensor] = [leaf * 1.0 for leaf in self.leaves]
        for _ in range(rng.randint(4, 24)):
            a, b = rng.choice(pool), rng.choice(pool)
            kind = rng.randrange(10)
            if kind == 0:
                pool.append(a + 0.5)
            elif kind == 1:
                pool.append(a * b)
            elif kind == 2:
                pool.append((a + b).exp().clamp(max=2.0))
            elif kind == 3:
                pool.append(torch.cat([part.tanh() for part in (a - b).chunk(4, dim=1)], dim=1))
            elif kind == 4:
                pool.append(F.dropout(a, 0.3))
            elif kind == 5:
                pool.append((a * 0.5).relu_())
            elif kind == 6:
                values, order = a.sort(dim=1)
                pool.append(values * order)
            elif kind == 7:
                pool.append((a + 1).sigmoid())
            elif kind == 8:
                pool.append((a @ b.t()).softmax(-1) @ b)
            else:
                pool.append(F.layer_norm(a, (8,)))
        return [rng.choice(pool).sum() for _ in range(3)]


def _gradients(losses: list[Tensor], leaves: list[Tensor], mode: int) -> list[Any]:
    """Run backward in one of several ways."""
    found: list[Any] = []
    if mode == 0:
        found += torch.autograd.grad(sum(losses[1:], losses[0]), leaves, allow_unused=True)
    elif mode == 1:  # parts of the graph, one after the other
        for loss in losses:
            found += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    elif mode == 2:  # for one of the leaves
        found += torch.autograd.grad(losses[0], leaves[:1], retain_graph=True, allow_unused=True)
        found += torch.autograd.grad(losses[1], leaves[1:], allow_unused=True)
    return found


def _count(program: _Program, mode: int, region: Any) -> tuple[list[Any], Counter[str], Counter[str], int]:
    with CountOperators() as forward, region:
        losses = program.forward()
    if mode == 3:  # a part of the graph is gone before
        losses[1:] = [loss.detach() for loss in losses[1:]]
        mode = 0
        losses = losses[:1]
    with CountOperators() as backward:
        found = _gradients(losses, program.leaves, mode)
    return found, forward.counts, backward.counts, {0: 1, 1: 3, 2: 2}[mode]


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("policy", ["recompute", ["aten.mm", "aten.mul.Tensor", "aten.native_layer_norm"]])
def test_no_operator_of_a_random_program_runs_more_than_once_more_per_backward(mode: int, policy: Any) -> None:
    for seed in range(random_programs.num_programs // 10):
        program = _Program(seed)
        expected, forward, plain, num_backwards = _count(program, mode, nullcontext())
        found, _, ours, _ = _count(program, mode, actckpt.region(policy))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other)), seed
        for name, number in ours.items():
            if "as_strided" in name or "view" in name or "set_" in name or "empty" in name:
                continue
            assert number - plain[name] <= num_backwards * forward[name], (seed, name)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("policy", ["recompute", ["aten.mm", "aten.mul.Tensor", "aten.native_layer_norm"]])
def test_random_programs_have_the_right_gradients_within_windows(
    mode: int, policy: Any, windows_from: Callable[[float], None]
) -> None:
    windows_from(0)
    for seed in range(random_programs.num_programs // 10):
        program = _Program(seed)
        expected = _count(program, mode, nullcontext())[0]
        found = _count(program, mode, actckpt.region(policy))[0]
        for one, other in zip(found, expected, strict=True):
            assert one is other or torch.equal(one, other), seed


@pytest.mark.parametrize("n", [64, 256])
def test_room_for_the_root_of_the_intermediates_takes_twice_the_operators(
    n: int, monkeypatch: pytest.MonkeyPatch, windows_from: Callable[[float], None]
) -> None:
    watch = _Watch(monkeypatch)
    windows_from(0)
    x = torch.linspace(0, 1, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(_chain(x, n), x)
    with actckpt.region():
        loss = _chain(x, n)
    found: list[Tensor] = []
    assert _num_replayed(lambda: found.extend(torch.autograd.grad(loss, x))) <= 3 * n  # exponentials once
    assert torch.equal(found[0], expected)
    assert max(watch.cached_bytes) <= 64 * 4 * (1.1 * (2 * n) ** 0.5 + 1)


def test_what_a_failed_backward_cached_goes() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("on purpose")

    x = torch.randn(64, requires_grad=True)
    with LiveStorages() as live:
        with actckpt.region():
            loss = _chain(Fails.apply(x.sin()) + x.cos(), 16) + 1
        before = live.live_bytes
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose"):
                torch.autograd.grad(loss, x, retain_graph=True)
            gc.collect()
            assert live.live_bytes == before


@pytest.mark.parametrize("window_from", [0, math.inf])
def test_two_threads_over_one_region_get_the_right_gradients(
    window_from: float, windows_from: Callable[[float], None]
) -> None:
    windows_from(window_from)
    x = torch.linspace(0, 1, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(_chain(x, 40), x)
    with actckpt.region():
        loss = _chain(x, 40)
    found: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            found.extend(torch.autograd.grad(loss, x, retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(gradient, expected) for gradient in found)


def test_gradients_of_gradients_are_right_within_a_window(windows_from: Callable[[float], None]) -> None:
    def run(region: Any) -> list[Tensor]:
        x = torch.linspace(0, 1, 64, requires_grad=True)
        with region:
            loss = _chain(x.sin(), 12)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return [first, second, *torch.autograd.grad(second.sum(), x)]

    expected = run(nullcontext())
    for window_from in (math.inf, 0, 600):
        windows_from(window_from)
        assert all(map(torch.equal, run(actckpt.region()), expected))


def test_an_order_of_ones_own_runs_no_operator_twice() -> None:
    asked: list[int] = []

    def as_in_forward(graph: Any) -> range:
        asked.append(len(graph.operators))
        return range(len(graph.operators))

    actckpt.configure(replay_order=as_in_forward)
    x = torch.linspace(0, 1, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(_chain(x, 32), x)
    with actckpt.region():
        loss = _chain(x, 32)
    found: list[Tensor] = []
    assert _num_replayed(lambda: found.extend(torch.autograd.grad(loss, x))) <= 64
    assert torch.equal(found[0], expected)
    assert max(asked) == 33  # the last exponential and all additions before it


class _Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(16, 32, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


def test_an_offloaded_product_of_a_batch_is_brought_back_once() -> None:
    """Backward reads it, and what is replayed does. Its view has a version counter of its own (`_unsafe_view`)."""
    model, x = _Gated(), leaf(4, 8, 16)
    weight = torch.randn(32, 5, requires_grad=True)

    def gradients(policy: Any) -> Any:
        with actckpt.region(policy):
            y = model(x) @ weight
        return torch.autograd.grad(y.square().sum(), [x, weight, *model.parameters()])

    expected = gradients("keep")
    with store_of_kind("memory"):
        for _ in range(3):
            actckpt.reset_stats()
            assert_equal(gradients({"gate::aten.mm.default": "offload"}), expected)
            flush()
        moved = actckpt.stats()
        assert moved.reloaded_bytes == moved.offloaded_bytes == 4 * 8 * 32 * 4


@pytest.mark.parametrize("through", ["the product", "its view"])
def test_a_change_of_such_a_product_while_backward_has_it_raises(through: str) -> None:
    """Each has a version counter of its own, and what was brought back shares only one of them."""
    x, w, weight = leaf(32, 16), leaf(16, 32), torch.randn(32, 5, requires_grad=True)
    kept: dict[str, Tensor] = {}

    def changed(grad: Tensor) -> None:
        kept[through].add_(1)

    with store_of_kind("memory"):
        for _ in range(2):
            with actckpt.region({"::aten.mm.default#0.0": "offload"}):
                product = x @ w
                view = torch.ops.aten._unsafe_view.default(product, (4, 8, 32))
                kept = {"the product": product.detach(), "its view": view.detach()}
                h = F.silu(view).exp()
                y = h @ weight
            flush()
            h.register_hook(changed)  # the replay of `h` has read it by then, and backward of silu reads it next
            with pytest.raises(actckpt.errors.SavedTensorChangedError):
                y.square().sum().backward()


class _Deep(torch.nn.Module):
    """Drops many values, which take more than a window that follows the sizes leaves in any case."""

    DEPTH = 160

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for _ in range(self.DEPTH):
            x = (x + 0.01).sin()
        return x


def test_what_a_block_drops_is_replayed_once_whatever_its_size() -> None:
    x = torch.linspace(0, 1, 1024 * 64).view(1024, 64)

    def gradients(apply: Callable[[torch.nn.Module], object]) -> tuple[int, list[Tensor]]:
        model = torch.nn.Sequential(_Deep(), _Deep())
        apply(model)
        found: list[Tensor] = []
        step = lambda: found.extend(torch.autograd.grad(model(x).sum(), list(model.parameters())))  # noqa: E731
        step()  # the first run of a region is audited
        return _num_replayed(step), found

    _, expected = gradients(lambda _: None)
    num, found = gradients(lambda model: actckpt.apply(model, [], blocks=_Deep))
    assert num == 2 * 2 * _Deep.DEPTH  # all but the last sine, whose result nothing saves
    assert_equal(found, expected)


def test_one_value_that_waits_is_not_replayed_twice_to_save_its_bytes() -> None:
    x, w = torch.randn(8192, 256, requires_grad=True), torch.randn(256, 8, requires_grad=True)
    for _ in range(2):
        with actckpt.region([]):
            loss = (x.sin().cos() @ w).sum()  # backward asks for the cosine, then for the sine
        num = _num_replayed(loss.backward)
    assert num == 2


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
