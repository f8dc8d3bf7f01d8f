"""Offloaded tensors come back as they were: every layout, dtype and subclass, over each kind of store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from internals.stores import flush
from layout_programs import PROGRAMS
from offload_oracle import TwoTensor, assert_same, two_tensor
from oracle import Programs, assert_equal, leaf
from torch.utils import _pytree

import actckpt

Context = Callable[[], Any]


pytestmark = pytest.mark.usefixtures("kind")
programs = Programs()


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", programs)
def test_functions_get_back_what_they_saved(name: str) -> None:
    assert_same(programs[name])


@pytest.mark.parametrize("is_flushed", [True, False], ids=["flushed", "in flight"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_comes_back_has_the_same_values_and_layout(name: str, is_flushed: bool) -> None:
    """Also what no gradient shows: shapes, strides, offsets behind the data, dtypes, conj and neg bits."""
    x = leaf(8, 8)
    torch.manual_seed(7)
    plainly = PROGRAMS[name](x * 1.5)
    expected = _saved_by(plainly)
    torch.manual_seed(7)
    with actckpt.offload(min_bytes=0):
        y = PROGRAMS[name](x * 1.5)
    if is_flushed:
        flush()
    saved = _saved_by(y)
    assert saved and actckpt.stats().offloaded_bytes
    assert [_layout(tensor) for tensor in saved] == [_layout(tensor) for tensor in expected]
    for tensor, value in zip(saved, expected, strict=True):
        if tensor.layout is torch.strided and tensor.dtype is not torch.uint8:  # a workspace, which nobody initialized
            assert_equal(tensor.detach(), value.detach())
    del saved, expected, tensor, value
    assert_equal(torch.autograd.grad(y, x), torch.autograd.grad(plainly, x))


def _saved_by(y: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that the graph of `y` saved, as their hooks bring them back."""
    nodes, found = [y.grad_fn], []
    for node in nodes:
        nodes += [other for other, _ in node.next_functions if other is not None and other not in nodes]
        saved = [getattr(node, name) for name in sorted(dir(node)) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())
        found += [tensor for tensor in _pytree.tree_leaves(saved) if isinstance(tensor, torch.Tensor)]
    return found


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor.layout
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device


class _SavesAs(torch.autograd.Function):
    """Saves its input in another dtype and multiplies with it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x.to(dtype), x.to(dtype).t())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        low, transposed = ctx.saved_tensors
        assert low.dtype is transposed.dtype and transposed.stride() == (1, 8)
        return grad * low.to(grad.dtype).abs() + transposed.to(grad.dtype).abs(), None


_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint32,
    torch.complex128,
    torch.complex32,
    torch.bfloat16,
)


@programs.each(dtype=_DTYPES)
def a_custom_function_that_saves_any_dtype(context: Context, dtype: torch.dtype) -> Any:
    x = leaf(8, 8)
    with context():
        y = _SavesAs.apply(x.abs() * 3, dtype)
    flush()
    return torch.autograd.grad(y.sum(), x)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        y, twice = x.sin(), x * 2
        ctx.mark_non_differentiable(twice)
        ctx.save_for_backward(x, y, None, x.cos(), x, twice)
        return y, twice

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        x, y, nothing, cosine, again, twice = ctx.saved_tensors
        assert nothing is None and torch.equal(x, again)
        return grad * cosine + y * x + twice


@programs
def a_custom_function_saves_inputs_outputs_intermediates_and_none(context: Context) -> Any:
    x = leaf(8, 8)
    with context():
        y, twice = Function.apply(x * 1.5)
    flush()
    return torch.autograd.grad((y * twice).sum(), x)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


@programs
def a_function_that_changes_its_input_in_place_saves_the_result(context: Context) -> Any:
    x = leaf(8, 8)
    with context():
        y = Exponential.apply(x * 1.5) + 1
    flush()
    return torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("build", [lambda h, w: h[1:5] * w[2:6].sin(), lambda h, w: (h.t() @ w).exp().view(64)])
def test_a_wrapper_subclass_is_taken_apart_and_rebuilt(build: Callable[..., torch.Tensor]) -> None:
    def program(context: Context) -> Any:
        x, w = two_tensor(8, 8).requires_grad_(), two_tensor(8, 8)
        with context():
            y = build(x * 1.5, w)
        flush()
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return grad.a, grad.b

    assert_same(program)
    assert actckpt.stats().offloaded_bytes >= 2 * 4 * 8 * 4


@programs
def an_alias_with_a_version_counter_of_its_own_does_not_get_older_bytes(context: Context) -> Any:
    """`h.data` begins at version 0 again; the span of h at version 0 holds what h was before."""
    h, unused, weight = torch.randn(64), leaf(64), leaf(64)
    with context():
        not_in_backward = unused * h
        flush()
        h.add_(1)
        y = weight * h.data
    flush()
    del not_in_backward
    return torch.autograd.grad(y.sum(), weight)


@programs
def bytes_of_a_subclass_changed_in_place_are_not_taken_for_those_before(context: Context) -> Any:
    """The inner tensors' versions stay when the outer tensor is changed: in __torch_dispatch__ nothing counts."""
    h, unused, weight = two_tensor(16), two_tensor(16).requires_grad_(), two_tensor(16).requires_grad_()
    with context():
        not_in_backward = unused * h
        flush()
        h.add_(1)
        y = weight * h
    flush()
    del not_in_backward
    (grad,) = torch.autograd.grad(y, weight, TwoTensor(torch.ones(16), torch.ones(16)))
    return grad.a, grad.b


@programs
def a_module_with_a_sparse_buffer(context: Context) -> Any:
    layer, x = torch.nn.Linear(4, 4), leaf(2, 4)
    layer.register_buffer("adjacency", torch.eye(4).to_sparse())
    with context():
        y = layer(x)
    return torch.autograd.grad(y.sum(), [x, *layer.parameters()])


@programs
def a_module_under_vmap(context: Context) -> Any:
    """Parameters are batched tensors, which have no storage."""
    layer = torch.nn.Linear(4, 4)
    stacked = {name: torch.stack([value.detach()] * 3).requires_grad_() for name, value in layer.named_parameters()}
    with context():
        y = torch.func.vmap(lambda p, x: torch.func.functional_call(layer, p, (x,)).sin())(stacked, torch.ones(3, 5, 4))
    flush()
    return torch.autograd.grad(y.sum(), list(stacked.values()))


@programs
def a_nested_tensor_of_the_strided_layout(context: Context) -> Any:
    a, b = leaf(2, 4), leaf(3, 4)
    with context():
        y = (torch.nested.as_nested_tensor([a, b]) * 2).sin()
    flush()
    return torch.autograd.grad(torch.nested.to_padded_tensor(y, 0.0).sum(), [a, b])


@programs
def a_nested_tensor_of_the_jagged_layout(context: Context) -> Any:
    """Its ragged size belongs to the offsets tensor by identity: rebuilt tensors do not match each other."""
    a, b = leaf(2, 4), leaf(3, 4)
    with context():
        nested = torch.nested.as_nested_tensor([a, b], layout=torch.jagged)
        y = ((nested * 2).sin() * nested).values().sum()
    flush()
    return torch.autograd.grad(y, [a, b])


def test_an_expanded_tensor_moves_the_bytes_behind_it() -> None:
    with actckpt.offload(min_bytes=0):
        y = (leaf(4) * 1).expand(1000, 4).sin()
    assert actckpt.stats().offloaded_bytes == 4 * 4
    del y


def test_a_storage_saved_many_times_is_copied_once() -> None:
    x = leaf(16, 16)
    h = x * 1
    with actckpt.offload(min_bytes=0):
        y = h.sin() + h.cos().sum() + h.exp() + h.t().tanh() + h.view(4, 64).sin().view(16, 16) + h[4:14].cos().sum()
    figures = actckpt.stats()
    # exp and tanh save their outputs.
    assert figures.offloaded_bytes == 3 * 16 * 16 * 4
    assert figures.deduplicated_bytes == (2 * 256 + 160) * 4
    del y


def test_two_contexts_share_what_is_moved_already() -> None:
    h = leaf(64) * 1
    with actckpt.offload(min_bytes=0):
        one = h.sin()
    with actckpt.offload(min_bytes=0):
        other = h.cos()
    figures = actckpt.stats()
    assert (figures.offloaded_bytes, figures.deduplicated_bytes, figures.idle_offloads) == (64 * 4, 64 * 4, 0)
    flush()
    value = h.detach().clone()
    (grad,) = torch.autograd.grad((one + other).sum(), h)
    assert torch.equal(grad, value.cos() - value.sin())


def test_an_address_used_again_is_not_taken_for_the_tensor_before() -> None:
    x = leaf(1000)
    outputs, expected = [], []
    with actckpt.offload(min_bytes=0):
        for step in range(50):
            h = x * (step + 1)
            outputs.append(h.sin())
            expected.append(h.detach().cos() * (step + 1))
            del h
            flush()  # frees the storage, so the allocator gives the address out again
    for y, want in reversed(list(zip(outputs, expected, strict=True))):
        assert_equal(torch.autograd.grad(y.sum(), x)[0], want)
    del outputs, y
