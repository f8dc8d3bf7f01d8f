"""Ways to run backward, to nest and to fail under offload: gradients are bit-equal and nothing is left in the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from internals.stores import PythonStore, flush, store_in_memory, using
from offload_oracle import assert_same, deep
from oracle import Programs, assert_equal, gradients, in_threads, leaf, mlp, ours

import actckpt

Context = Callable[[], AbstractContextManager[Any]]


pytestmark = pytest.mark.usefixtures("kind")


programs = Programs()


@pytest.mark.parametrize("name", programs)
def test_gradients_of_every_way_to_run_backward_are_bit_equal(name: str) -> None:
    assert_same(programs[name])


def test_a_retained_graph_does_not_grow() -> None:
    """Neither in the store nor in what was brought back, also for tensors saved several times."""
    store = PythonStore(store_in_memory())
    x = leaf(32, 32)
    with using(store):
        with actckpt.offload(min_bytes=0):
            h = x * 1
            y = (h.sin() + h.cos() + deep(h)).sum()
        del h
        store.inner.flush()
        held = store.inner.stats().num_live
        for _ in range(3):
            torch.autograd.grad(y, x, retain_graph=True)
            assert store.inner.stats().num_live == held > 0
            assert store.buffers and all(reference() is None for reference in store.buffers)
        del y


@programs
def hessian_vector_products_and_batched_gradients(context: Context) -> Any:
    x = leaf(6)
    with context():
        y = (torch.outer(x, x).sin() @ x).exp()
    flush()
    batched = torch.autograd.grad(y, x, torch.eye(6), is_grads_batched=True, retain_graph=True)
    return batched, torch.autograd.grad(y.sum(), x)


def test_a_graph_whose_backward_never_runs_gives_its_bytes_back() -> None:
    with actckpt.offload(min_bytes=0):
        y = deep(leaf(32, 32))
        for _ in range(20):  # dropped while they are written
            deep(leaf(64, 64))
    flush()
    assert actckpt.stats().store_bytes == 4 * 32 * 32 * 4
    del y
    assert actckpt.stats().store_bytes == 0


@programs.each(order=[(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)], in_one_context=[True, False])
def several_graphs_alive_run_in_any_order(context: Context, order: tuple[int, ...], in_one_context: bool) -> Any:
    x = leaf(8, 8)
    outputs = []
    with ExitStack() as stack:
        if in_one_context:
            stack.enter_context(context())
        for n in range(3):
            with context() if not in_one_context else ExitStack():
                outputs.append(deep(x * (n + 1)))
    flush()
    return [torch.autograd.grad(outputs[n], x) for n in order]


def test_an_exception_in_forward_leaves_nothing() -> None:
    x = leaf(8, 8)
    with pytest.raises(ZeroDivisionError), actckpt.offload(min_bytes=0):
        y = deep(x)
        raise ZeroDivisionError
    del y
    flush()
    assert actckpt.stats().store_bytes == 0
    assert type(x.sin().grad_fn._saved_self) is torch.Tensor, "the hooks are gone"


def test_eight_threads_train_at_once() -> None:
    def train(seed: int, context: Context) -> Any:
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(16, 16, generator=generator).requires_grad_()
        for _ in range(10):
            with context():
                y = deep(w * 0.5)
            (grad,) = torch.autograd.grad(y, w)
            w = (w - 0.1 * grad).detach().requires_grad_()
        return w.detach()

    found = in_threads(lambda seed: train(seed, lambda: actckpt.offload(min_bytes=0)), 8)
    assert_equal(found, [train(seed, ExitStack) for seed in range(8)])


def test_eight_threads_run_backward_over_graphs_of_one_context() -> None:
    x = leaf(16, 16)
    expected = [torch.autograd.grad(deep(x * n), x)[0] for n in range(8)]
    with actckpt.offload(min_bytes=0):
        outputs = [deep(x * n) for n in range(8)]
    flush()
    assert_equal(in_threads(lambda n: torch.autograd.grad(outputs[n], x)[0], 8), expected)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("is_offloading", [True, False])
def test_inputs_of_regions_are_offloaded(depth: int, is_offloading: bool) -> None:
    elements = 1 << 18  # what offload_inputs takes by default

    def program(context: Context) -> Any:
        x, scale = leaf(elements), torch.full((elements,), 0.5)

        def region(level: int, h: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            h = (h * scale).sin()
            return h if level == 0 else ours(region, level - 1, h, scale=scale, offload_inputs=True).cos()

        with context() if is_offloading else ExitStack():
            y = ours(region, depth, x * 1.5, scale=scale, offload_inputs=True)
            y = ours(region, depth, y, scale=scale, offload_inputs=True).sum()
        flush()
        return torch.autograd.grad(y, x, retain_graph=True), torch.autograd.grad(y, x)

    assert_same(program)
    assert actckpt.stats().offloaded_bytes > 0


def test_blocks_are_offloaded_by_apply() -> None:
    torch.manual_seed(1)
    blocks = [mlp(8, 1) for _ in range(3)]
    model, x = torch.nn.Sequential(*blocks), torch.randn(4, 8)
    model(x).exp().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    actckpt.apply(model, policy="offload", min_bytes=0)
    for _ in range(2):
        model.zero_grad()
        y = model(x).exp().sum()
        flush()
        y.backward()
        assert_equal(gradients(model), expected)
    assert actckpt.stats().offloaded_bytes > 0
    actckpt.remove(model)


def test_blocks_compiled_before_run_inside() -> None:
    torch._dynamo.reset()
    model = mlp(8, 2)
    compiled = torch.compile(model, backend="aot_eager")

    def program(context: Context) -> Any:
        x = leaf(4, 8)
        with context():
            y = compiled(x).exp().sum()
        flush()
        return torch.autograd.grad(y, [x, *model.parameters()])

    assert_same(program)


def test_a_block_is_compiled_inside_the_context_without_a_warning() -> None:
    """A global module hook makes torch.compile warn, and fire it twice."""
    layer = torch.nn.Linear(8, 8)
    with actckpt.offload(min_bytes=0):
        y = torch.compile(layer, backend="aot_eager")(torch.randn(4, 8))
    y.sum().backward()


def test_as_a_decorator_and_again() -> None:
    @actckpt.offload(min_bytes=0)
    def forward(x: torch.Tensor, depth: int) -> torch.Tensor:
        return deep(x) if depth == 0 else forward(x.sin(), depth - 1)

    x = leaf(8, 8)
    for depth in (0, 2):
        y = forward(x, depth)
        flush()
        h = x
        for _ in range(depth):
            h = h.sin()
        assert_equal(torch.autograd.grad(y, x), torch.autograd.grad(deep(h), x))
    del y, h
