"""Offloaded tensors come back as they were: every layout, dtype and subclass, over each kind of store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from offload_oracle import KINDS, TwoTensor, assert_same, flush, live_tickets, store_of_kind, two_tensor
from oracle import assert_equal, leaf
from torch.autograd.graph import saved_tensors_hooks

import actckpt
from actckpt._offload.session import Session

Context = Callable[[], Any]
Program = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with store_of_kind(request.param):
        actckpt.reset_stats()
        yield request.param
        assert live_tickets() == 0, "every graph of the test is gone"


def _complex_parts(h: torch.Tensor) -> torch.Tensor:
    z = torch.complex(h, h.sin())
    w = z.conj() * z.exp()
    return (w.conj().imag * w.real + (z.conj() @ w.mH).abs()).sum()


def _negative_bit(h: torch.Tensor) -> torch.Tensor:
    z = torch.complex(h, h.cos()).conj()
    assert z.imag.is_neg()
    return (z.imag * z.imag.exp() * z.real).sum()


def _booleans(h: torch.Tensor) -> torch.Tensor:
    mask = h.detach() > 0
    return (torch.where(mask, h.sin(), h.cos()) + h.masked_fill(mask, 2.0).exp()).sum() + h[mask].square().sum()


def _overlapping_views(h: torch.Tensor) -> torch.Tensor:
    flat = h.contiguous().view(-1)
    windows = flat.as_strided((60, 5), (1, 1)).clone().sin()
    return (windows * flat.unfold(0, 5, 1)[:60]).sum() + (flat[2:40] * flat[:38]).exp().sum()


def _channels_last(h: torch.Tensor) -> torch.Tensor:
    x = h.reshape(1, 4, 4, 4).contiguous(memory_format=torch.channels_last)
    y = F.conv2d(x, x.detach()[:, :, :3, :3] * 0.5)
    return (F.gelu(y) * y.sigmoid()).sum() + F.max_pool2d(x, 2).sin().sum()


def _integers(h: torch.Tensor) -> torch.Tensor:
    order = h.detach().argsort(dim=0)
    return (
        h.gather(0, order).sin().sum() + h.index_select(0, order[:, 0]).exp().sum() + h.sort(dim=1).values.cos().sum()
    )


def _zero_sized(h: torch.Tensor) -> torch.Tensor:
    return torch.cat([h[:0].sin().exp(), h.sin() * 2, h[:, :0].cos().T.reshape(0, 8)]).exp().sum()


def _recurrent(h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.nn.LSTM(8, 8, batch_first=True)(h[None])[0].sin().sum()


def _attention(h: torch.Tensor) -> torch.Tensor:
    q = h.view(1, 2, 4, 8)
    return F.scaled_dot_product_attention(q, q.sin(), q.transpose(2, 3).contiguous().mT, is_causal=True).sin().sum()


def _of_several_sizes(h: torch.Tensor) -> torch.Tensor:
    return sum((F.layer_norm(h[:n, :n].sin(), (n,)) @ h[:n, :n].T).exp().mean() for n in range(1, 8))


PROGRAMS: dict[str, Program] = {
    "activations": lambda h: (h.sin().exp() * h.tanh().sigmoid()).sum(),
    "transposes": lambda h: (h.T.sin() @ h.T.contiguous().T.cos().mT).softmax(-1).square().sum(),
    "slices with steps": lambda h: (h[::2, 1::3].sin() * h[1::2, ::3].cos()).sum(),
    "offsets of odd size": lambda h: (h.flatten()[1:50].view(7, 7) @ h.flatten()[3:52].view(7, 7).sin()).exp().mean(),
    "channels last": _channels_last,
    "expanded": lambda h: (h.sum(1)[:, None].expand(8, 300).sin() * h.mean().expand(8, 300)).sum(),
    "expanded twice over": lambda h: (h[None, :, :1].expand(5, 8, 8) @ h.expand(5, 8, 8).sin()).sum(),
    "overlapping views": _overlapping_views,
    "a small view of a large storage": lambda h: (torch.cat([h.flatten()] * 9)[17:21] * h[0, :4]).exp().sum(),
    "zero sizes": _zero_sized,
    "scalars": lambda h: (h.sum().sin() * h.mean().exp()).tanh(),
    "complex and conjugated": _complex_parts,
    "negated lazily": _negative_bit,
    "viewed as real": lambda h: torch.view_as_real(torch.view_as_complex(h.view(8, 4, 2).sin()).square()).exp().sum(),
    "viewed as another type": lambda h: (h * h.detach().sin().view(torch.int32).remainder(7)).exp().mean(),
    "booleans": _booleans,
    "integers": _integers,
    "half precision": lambda h: (h.half().sin() @ h.half().T).float().sum() + (h.bfloat16().exp() * 2).sum().float(),
    "double precision": lambda h: (h.double().sin() @ h.double().T.cos()).sum(),
    "in place before it is saved": lambda h: h.clone().mul_(2).sin_().exp_().mul(h).sum(),
    "dropout": lambda h: F.dropout(h.sin(), 0.4).exp().sum(),
    "convolution in one dimension": lambda h: F.conv1d(h[None], h.view(4, 8, 2).sin()).exp().mean(),
    "batch norm": lambda h: F.batch_norm(h.sin(), None, None, training=True).exp().sum(),
    "recurrent layers": _recurrent,
    "attention": _attention,
    "scan": lambda h: h.cumsum(0).sin().cumprod(1).sum(),
    "linear algebra": lambda h: torch.linalg.solve(h @ h.T + 9 * torch.eye(8), h).sum() + torch.linalg.svdvals(h).sum(),
    "fourier": lambda h: torch.fft.rfft2(h.sin()).abs().exp().mean(),
    "sparse": lambda h: torch.sparse.mm(torch.eye(8).to_sparse(), h.sin()).exp().sum(),
    "embedding": lambda h: F.embedding(torch.tensor([1, 5, 1]), h.sin()).exp().sum(),
    "several sizes": _of_several_sizes,
}


@pytest.mark.parametrize("is_flushed", [True, False], ids=["flushed", "in flight"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_bit_equal(name: str, is_flushed: bool) -> None:
    def program(context: Context) -> Any:
        x = leaf(8, 8)
        with context():
            y = PROGRAMS[name](x * 1.5)
        if is_flushed:
            flush()
        return y.detach(), torch.autograd.grad(y, x)

    assert_same(program)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_comes_back_has_the_same_values_and_layout(name: str) -> None:
    """Also what no gradient shows: shapes, strides, offsets behind the data, dtypes, conj and neg bits."""
    saved, restored = [], []
    session = Session("auto", 0)

    def pack(tensor: torch.Tensor) -> Any:
        copy = tensor.clone(memory_format=torch.preserve_format) if tensor.layout is torch.strided else tensor
        saved.append((copy.resolve_conj().resolve_neg(), _layout(tensor)))
        return session.pack(tensor), len(saved) - 1

    def unpack(handle: Any) -> torch.Tensor:
        tensor = session.unpack(handle[0])
        value, layout = saved[handle[1]]
        if tensor.layout is torch.strided:
            assert torch.equal(tensor, value.view_as(tensor) if value.shape == tensor.shape else value)
            assert _layout(tensor) == layout
        restored.append(handle[1])
        return tensor

    x = leaf(8, 8)
    with saved_tensors_hooks(pack, unpack):
        y = PROGRAMS[name](x * 1.5)
    flush()
    torch.autograd.grad(y, x)
    assert restored


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


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_custom_function_saves_any_dtype(dtype: torch.dtype) -> None:
    def program(context: Context) -> Any:
        x = leaf(8, 8)
        with context():
            y = _SavesAs.apply(x.abs() * 3, dtype)
        flush()
        return torch.autograd.grad(y.sum(), x)

    assert_same(program)


def test_a_custom_function_saves_inputs_outputs_intermediates_and_none() -> None:
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

    def program(context: Context) -> Any:
        x = leaf(8, 8)
        with context():
            y, twice = Function.apply(x * 1.5)
        flush()
        return torch.autograd.grad((y * twice).sum(), x)

    assert_same(program)


def test_a_function_that_changes_its_input_in_place_saves_the_result() -> None:
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

    def program(context: Context) -> Any:
        x = leaf(8, 8)
        with context():
            y = Exponential.apply(x * 1.5) + 1
        flush()
        return torch.autograd.grad(y.sum(), x)

    assert_same(program)


def _subclass_program(context: Context, build: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    x, w = two_tensor(8, 8).requires_grad_(), two_tensor(8, 8)
    with context():
        y = build(x * 1.5, w)
    flush()
    ones = TwoTensor(torch.ones(y.a.shape), torch.ones(y.b.shape))
    (grad,) = torch.autograd.grad(y, x, ones)
    return grad.a, grad.b


@pytest.mark.parametrize(
    "build",
    [
        lambda h, w: h.sin() * w,
        lambda h, w: (h.t() @ w).exp(),
        lambda h, w: h[1:5] * w[2:6].sin(),
        lambda h, w: h.sin().view(64) * w.view(64),
    ],
)
def test_a_wrapper_subclass_is_taken_apart_and_rebuilt(build: Any) -> None:
    assert_same(lambda context: _subclass_program(context, build))
    assert actckpt.stats().offloaded_bytes >= 2 * 4 * 8 * 4


def test_a_wrapper_subclass_in_a_wrapper_subclass_comes_back() -> None:
    def program(context: Context) -> Any:
        x = TwoTensor(two_tensor(8), two_tensor(8)).requires_grad_()
        with context():
            y = x.sin() * x
        flush()
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return [getattr(getattr(grad, i), j) for i in "ab" for j in "ab"]

    assert_same(program)


def test_a_subclass_without_flatten_stays_and_keeps_its_type() -> None:
    class Named(torch.Tensor):
        pass

    def program(context: Context) -> Any:
        x = leaf(8).as_subclass(Named) * 1
        with context():
            y = x.sin()
        assert type(y) is Named
        return (torch.autograd.grad(y.sum(), x)[0].as_subclass(torch.Tensor),)

    assert_same(program)


def test_an_expanded_tensor_moves_the_bytes_behind_it() -> None:
    with actckpt.offload(min_bytes=0):
        y = (leaf(4) * 1).expand(1000, 4).sin()
    assert actckpt.stats().offloaded_bytes == 4 * 4
    del y


def test_a_small_view_of_a_large_storage_moves_its_own_bytes() -> None:
    with actckpt.offload(min_bytes=0):
        y = (leaf(100_000) * 1)[500:510].sin()
    assert actckpt.stats().offloaded_bytes == 10 * 4
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
    assert actckpt.stats().offloaded_bytes == 64 * 4
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


def test_each_unpack_gives_a_tensor_of_its_own() -> None:
    """TransformerEngine clears what it was given."""
    h = leaf(64) * 1
    value = h.detach().clone()
    with actckpt.offload(min_bytes=0):
        y = h.sin()
    flush()
    first = y.grad_fn._saved_self
    first.data = torch.empty(0)
    assert torch.equal(y.grad_fn._saved_self, value)
    assert torch.equal(torch.autograd.grad(y.sum(), h)[0], value.cos())
