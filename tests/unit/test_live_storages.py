"""The storage counter and measured steps against bytes computed by hand."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import in_threads, no_collector
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from actckpt.memory import LiveStorages, measure_step

FLOAT_BYTES = 4
BATCH, WIDTH, HIDDEN = 8, 16, 32
SCALAR_BYTES = FLOAT_BYTES
WIDE_BYTES = BATCH * HIDDEN * FLOAT_BYTES
NARROW_BYTES = BATCH * WIDTH * FLOAT_BYTES


def _mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH), torch.nn.ReLU()
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)


def test_bytes_held_after_forward_are_the_saved_tensors_of_an_mlp(x: torch.Tensor) -> None:
    model = _mlp()
    with LiveStorages() as live:
        loss = model(x).sum()
        # GELU saves its input, the second linear GELU's output, ReLU its own output; x was there before.
        assert live.live_bytes == 2 * WIDE_BYTES + NARROW_BYTES + SCALAR_BYTES
        # The second linear's output dies when ReLU has returned.
        assert live.peak_bytes == 2 * WIDE_BYTES + 2 * NARROW_BYTES
    del loss
    assert live.live_bytes == 0


def test_parameters_and_inputs_are_never_counted(x: torch.Tensor) -> None:
    model = _mlp()
    with LiveStorages() as live, torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        x.add_(1)
        x.view(-1)[3:]
        x.resize_(2 * BATCH, WIDTH)
    assert live.peak_bytes == 0


def test_gradients_of_parameters_are_reported_apart(x: torch.Tensor) -> None:
    model = _mlp()
    model_bytes = sum(p.numel() * FLOAT_BYTES for p in model.parameters())
    with LiveStorages(parameters=model.parameters()) as live:
        model(x).sum().backward()
        assert (live.live_bytes, live.gradient_bytes) == (0, model_bytes)
        model.zero_grad(set_to_none=True)
        assert (live.live_bytes, live.gradient_bytes) == (0, 0)
    with LiveStorages() as everything:
        model(x).sum().backward()
        assert (everything.live_bytes, everything.gradient_bytes) == (model_bytes, 0)
    model(x).sum().backward()  # no hook is left: nothing is counted any more
    assert live.gradient_bytes == 0


def test_gradients_kept_from_before_give_the_same_peak_as_gradients_counted_apart(x: torch.Tensor) -> None:
    model = _mlp()
    with LiveStorages(parameters=model.parameters()) as apart:
        model(x).sum().backward()
    step = measure_step(lambda: model(x).sum().backward(), device="cpu", parameters=model.parameters())
    assert step.peak_bytes == apart.peak_bytes


def test_views_and_in_place_operators_cost_nothing_and_a_view_keeps_its_storage() -> None:
    with LiveStorages() as live:
        base = torch.zeros(100)
        base.add_(1).mul_(2)
        view = base.view(10, 10).t()[3]
        expanded = view.expand(1000, 10)
        assert live.live_bytes == live.peak_bytes == 100 * FLOAT_BYTES
        del base, view
        assert live.live_bytes == 100 * FLOAT_BYTES
        del expanded
        assert live.live_bytes == 0


def _foreach() -> Any:
    made = torch._foreach_add([torch.ones(10), torch.ones(20)], 1)
    torch._foreach_mul_(made, 2)
    return made


def _grown() -> torch.Tensor:
    return torch.empty(0).resize_(50)


def _swapped(how: str) -> torch.Tensor:
    t = torch.ones(100)
    if how == "set_":
        t.set_(torch.ones(7))
    else:
        t.data = torch.ones(7)
    return t


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(100) * 2


#: What makes tensors, and the bytes of their storages.
_MADE: dict[str, tuple[Callable[[], Any], int]] = {
    "several outputs": (lambda: (torch.zeros(64).chunk(4), torch.zeros(10, 4).max(dim=1)), 64 * 4 + 10 * (4 + 8)),
    "foreach": (_foreach, 30 * 4),
    "of numbers of Python": (lambda: torch.tensor([1.0, 2.0]), 2 * 4),
    "of zero size": (lambda: torch.empty(0), 0),
    "grown": (_grown, 50 * 4),
    "grown as out": (lambda: torch.add(torch.ones(70), 1, out=_grown().resize_(0)), 70 * 4),
    "set_": (lambda: _swapped("set_"), 7 * 4),
    "data": (lambda: _swapped("data"), 7 * 4),
    "sparse": (lambda: torch.eye(5).to_sparse(), 2 * 5 * 8 + 5 * 4),
    # Row starts, values, and the COO indices that the column indices are a view of.
    "sparse rows": (lambda: torch.eye(5).to_sparse_csr(), 6 * 8 + 2 * 5 * 8 + 5 * 4),
    "meta": (lambda: torch.ones(100, device="meta") * 2, 0),
    "fake": (_fake, 0),
    "a subclass": (lambda: torch.relu(TwoTensor(torch.ones(10), torch.ones(10)) * 2), 2 * 10 * 4),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", _MADE)
def test_bytes_are_those_of_the_storages_that_are_alive(name: str) -> None:
    make, nbytes = _MADE[name]
    with LiveStorages() as live:
        made = make()
        assert live.live_bytes == nbytes
        del made
        assert live.live_bytes == 0


def test_a_resized_storage_counts_its_new_size_at_once() -> None:
    original = torch.UntypedStorage.resize_
    with LiveStorages() as live:
        t = torch.ones(100)
        t.untyped_storage().resize_(0)
        assert live.live_bytes == 0
        t.untyped_storage().resize_(400)
        assert live.live_bytes == live.peak_bytes == 400
    assert torch.UntypedStorage.resize_ is original
    t.untyped_storage().resize_(800)  # nobody watches any more
    assert live.live_bytes == 400
    del t
    assert live.live_bytes == 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no mkldnn")
def test_layouts_without_storage_are_passed_over() -> None:
    x = torch.ones(3, 3)
    with LiveStorages() as live:
        x.to_mkldnn()
    assert live.peak_bytes == 0


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_what_meta_and_fake_tensors_would_hold_is_counted_on_request(mode: Any) -> None:
    def run(device: str, counted: str | None) -> tuple[int, int, int]:
        x = torch.ones(64, 64, device=device, requires_grad=True)
        with LiveStorages(parameters=[x], device=counted) as live:
            y = x.sin()[:32].repeat(2, 1).exp()
            held_bytes = live.live_bytes
            y.sum().backward()
        return held_bytes, live.peak_bytes, live.gradient_bytes

    expected = run("cpu", None)
    assert run("cpu", "meta") == (0, 0, 0)
    with mode():
        assert run("cpu" if mode is FakeTensorMode else "meta", "meta") == expected


def test_peak_is_the_most_that_lived_at_once_and_can_be_reset() -> None:
    with LiveStorages() as live:
        kept = torch.ones(100)
        torch.ones(1000)
        torch.ones(500)
        assert live.peak_bytes == 1100 * FLOAT_BYTES
        live.reset_peak()
        assert live.peak_bytes == 100 * FLOAT_BYTES
    del kept


def test_counters_nest_are_entered_again_and_end_in_any_order() -> None:
    first, second, cuda = LiveStorages(), LiveStorages(), LiveStorages(device="cuda")
    with cuda, first:
        a = torch.ones(10)
        second.__enter__()
        b = a + 1
        a.add_(1)
        b.untyped_storage().resize_(80)
        assert (first.live_bytes, second.live_bytes, cuda.live_bytes) == (120, 80, 0)
    c = torch.ones(1)
    assert (first.live_bytes, second.live_bytes) == (120, 84)
    second.__exit__(None, None, None)
    with second, first, first:
        d = torch.ones(2)
    assert (first.live_bytes, second.live_bytes) == (128, 92)
    del a, b, c, d
    assert (first.live_bytes, second.live_bytes) == (0, 0)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_an_exception_inside_leaves_no_trace(x: torch.Tensor) -> None:
    model, original = _mlp(), torch.UntypedStorage.resize_
    live = LiveStorages(parameters=model.parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), live:
        model(x) @ torch.ones(3, 3)
    gc.collect()
    assert live.live_bytes == 0
    assert torch.UntypedStorage.resize_ is original
    assert not model[0].weight._post_accumulate_grad_hooks


def test_neither_storages_nor_the_counter_are_kept_alive() -> None:
    live = LiveStorages(timeline=True)
    with live:
        t = torch.ones(10)
        storage = weakref.ref(t.untyped_storage())
    del t
    assert storage() is None
    counter = weakref.ref(live)
    del live
    gc.collect()
    assert counter() is None


def test_memory_in_a_reference_cycle_counts_until_it_is_collected() -> None:
    with no_collector(), LiveStorages() as live:
        cycle = [torch.ones(10)]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        assert live.live_bytes == 10 * FLOAT_BYTES
        gc.collect()
        assert live.live_bytes == 0


def test_many_steps_leave_nothing_behind(x: torch.Tensor) -> None:
    model = _mlp()
    with LiveStorages() as live:
        for _ in range(50):
            checkpoint(model, x, use_reentrant=False).sum().backward()
            model.zero_grad(set_to_none=True)
            assert live.live_bytes == 0
        assert not live._entries
        assert not live._deaths


def test_storages_that_die_in_another_thread_are_noticed() -> None:
    with LiveStorages() as live:
        held = [torch.ones(10)]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert live.live_bytes == 0


def test_threads_with_their_own_counters_do_not_disturb_each_other() -> None:
    original = torch.UntypedStorage.resize_

    def work(_: int) -> int:
        with LiveStorages() as live:
            for _ in range(100):
                t = torch.ones(10)
                t.untyped_storage().resize_(80)
                u = torch.relu(t)
            found = live.live_bytes
            del u
        return found

    assert in_threads(work, 8) == [80 + 40] * 8
    assert torch.UntypedStorage.resize_ is original


def test_backward_in_an_autograd_thread_is_counted() -> None:
    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth  # type: ignore[attr-defined]
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            threads.add(threading.get_ident())
            if ctx.depth > 0:  # type: ignore[attr-defined]
                with torch.enable_grad():
                    Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()  # type: ignore
            else:
                held.append(torch.ones(1000))
            return grad, None

    threads: set[int] = set()
    held: list[torch.Tensor] = []
    with LiveStorages() as live:
        Deep.apply(torch.ones(1, requires_grad=True), 100).sum().backward()  # type: ignore[no-untyped-call]
        gc.collect()
        assert len(threads) > 1  # autograd hands backwards nested this deep to threads of its own
        assert live.live_bytes == 1000 * FLOAT_BYTES


def test_parameters_that_are_no_leaves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 of 1 parameters are not leaves.*\(3,\).*model.parameters"):
        LiveStorages(parameters=[torch.ones(3, requires_grad=True) * 2])


def test_timeline_starts_at_nothing_and_reaches_the_peak(x: torch.Tensor) -> None:
    model = _mlp()
    step = measure_step(lambda: model(x).sum().backward(), device="cpu", parameters=model.parameters())
    seconds, sizes = zip(*step.timeline, strict=True)
    assert list(seconds) == sorted(seconds)
    assert seconds[0] >= 0
    assert sizes[0] == WIDE_BYTES
    assert max(sizes) == step.peak_bytes
    assert sizes[-1] == 0
    with LiveStorages() as live:
        torch.ones(1)
    assert live.timeline == ()


def test_a_step_that_replaces_gradients_is_refused(x: torch.Tensor) -> None:
    model = _mlp()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    with pytest.raises(ValueError, match=r"replaced 4 of 4 parameter gradients.*Leave zero_grad"):
        measure_step(step, device="cpu", parameters=model.parameters())
