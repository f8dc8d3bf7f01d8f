"""What the random programs of replay are made of: each entry takes a pool of tensors and three numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import on_device
import torch
from on_device import memory_of
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name

__all__ = ["OPERATORS", "fit"]

LIMIT = 36
Pool = list[Tensor]
#: Takes a pool and three numbers; returns the new tensors.
Operator = Callable[[Pool, int, int, int], Any]


def at(pool: Pool, index: int) -> Tensor:
    """Return a tensor of the pool."""
    return pool[index % len(pool)]


def fit(source: Tensor, *shape: int) -> Tensor:
    """Return the numbers of `source` in another shape, through views where that works."""
    flat = source.reshape(-1)
    count = 1
    for size in shape:
        count *= size
    if flat.numel() == 0:
        return torch.zeros(shape, dtype=source.dtype) + flat.sum()
    if flat.numel() < count:
        flat = flat.repeat(-(-count // flat.numel()))
    return flat[:count].view(shape)


def real(tensor: Tensor) -> Tensor:
    """Return real numbers."""
    return tensor.real if tensor.is_complex() else tensor


def _pair(pool: Pool, a: int, b: int) -> tuple[Tensor, Tensor]:
    left = at(pool, a)
    return left, fit(at(pool, b), *left.shape)


def _square(pool: Pool, a: int) -> Tensor:
    return fit(real(at(pool, a)), 4, 4)


def _of_numpy(number: int) -> Tensor:
    made = torch.from_numpy(memory_of(torch.arange(16.0).view(4, 4)) * (number + 1))
    return made.to(on_device.device_type)


class Dirty(torch.autograd.Function):
    """Changes its input in place and saves what it became."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(0.5).sin_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


class TwoOutputs(torch.autograd.Function):
    """Saves an input, an intermediate and an output; one of its outputs cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        middle = x.cos()
        out = middle * y
        ctx.save_for_backward(x, middle, out)
        mask = out > 0
        ctx.mark_non_differentiable(mask)
        return out, mask.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, middle, out = ctx.saved_tensors
        return grad * x.sin() + out * 0.1, grad * middle


def _unary(function: Callable[[Tensor], Any]) -> Operator:
    return lambda pool, a, b, c: function(at(pool, a))


def _on_square(function: Callable[[Tensor], Any]) -> Operator:
    return lambda pool, a, b, c: function(_square(pool, a))


def _on_squares(function: Callable[[Tensor, Tensor], Any]) -> Operator:
    return lambda pool, a, b, c: function(_square(pool, a), _square(pool, b))


def _binary(function: Callable[[Tensor, Tensor], Any]) -> Operator:
    return lambda pool, a, b, c: function(*_pair(pool, a, b))


def _in_place(change: Callable[[Tensor], Any]) -> Operator:
    """Change a tensor of the pool, and with it every tensor that shares its memory."""

    def operator(pool: Pool, a: int, b: int, c: int) -> Any:
        change(at(pool, a))
        return ()

    return operator


def _in_place_with(change: Callable[[Tensor, Tensor], Any]) -> Operator:
    def operator(pool: Pool, a: int, b: int, c: int) -> Any:
        change(at(pool, a), fit(at(pool, b), *at(pool, a).shape))
        return ()

    return operator


def _strided(t: Tensor, b: int, c: int) -> Tensor:
    flat = t.contiguous().view(-1)[:16]
    if flat.numel() < 8:
        return flat
    return flat.as_strided((2, 3), (1 + b % 2, 1 + c % 2), flat.storage_offset() + b % 2)


def _into_buffer(pool: Pool, a: int, b: int, c: int) -> Any:
    left, right = real(at(pool, a)), real(at(pool, b))
    buffer = torch.empty(left.numel() + right.numel(), dtype=torch.float32)
    buffer[: left.numel()].copy_(left.reshape(-1))
    buffer[left.numel() :].copy_(right.reshape(-1))
    return (buffer, buffer[1::2]) if c % 2 else (buffer.sin(), buffer[:LIMIT])


def _into_part_of_buffer(pool: Pool, a: int, b: int, c: int) -> Any:
    left = _square(pool, a)
    buffer = torch.empty(8, 4)
    buffer[2:6] = left
    product = buffer[2:6] * _square(pool, b)
    buffer[:2] = left[:2].detach()
    return product, buffer[:6] * 2


def _by_rows_or_columns(pool: Pool, a: int, b: int, c: int) -> Any:
    sources = _square(pool, a), _square(pool, b)
    buffer = torch.empty(4, 4) if b % 2 else torch.empty(4, 4).t()
    rows = buffer if c % 2 else buffer.t()
    for i in ((0, 1, 2, 3), (3, 1, 0, 2), (1, 2, 3))[c % 3]:
        rows[i] = sources[i % 2][i]
        if i == a % 4:
            rows[i].mul_(0.5)
    return (rows[1:] * 2, rows[1]) if c % 3 == 2 else (buffer, buffer.cos())


@torch.no_grad()
def _out(pool: Pool, a: int, b: int, c: int) -> Any:
    left, right = _square(pool, a), _square(pool, b)
    buffers = (torch.empty(0), torch.empty(4, 4), torch.zeros(5, 4)[1:], torch.empty(4, 4).t())
    buffer = buffers[c % 4]
    (torch.mul, torch.mm, torch.add)[c % 3](left, right, out=buffer)
    return buffer, torch.sin(buffer)


@torch.no_grad()
def _out_of_pool(pool: Pool, a: int, b: int, c: int) -> Any:
    target = at(pool, a).detach()
    torch.sin(fit(at(pool, b), *target.shape).clone(), out=target)
    return ()


def _foreach(pool: Pool, a: int, b: int, c: int) -> Any:
    tensors = [at(pool, a), at(pool, b)]
    if any(t._is_view() for t in tensors) or tensors[0].untyped_storage() is tensors[1].untyped_storage():
        # Torch's gradients differ with and without a dispatch mode where such lists change views or overlap.
        tensors = [t.detach() for t in tensors]
    if c % 3 == 0:
        torch._foreach_mul_(tensors, 0.7)
    elif c % 3 == 1:
        torch._foreach_add_(tensors, [t.detach().clone() for t in tensors])
    return torch._foreach_sin(tensors) if c % 2 else torch._foreach_mul(tensors, tensors)


def _index_put(t: Tensor) -> None:
    t[torch.zeros_like(t, dtype=torch.bool).bernoulli_(0.5)] = 0.25


def _batch_norm(pool: Pool, a: int, b: int, c: int) -> Any:
    mean, variance = torch.zeros(4), torch.ones(4)
    out = F.batch_norm(_square(pool, a), mean, variance, training=True)
    again = F.batch_norm(_square(pool, b), mean, variance, training=c % 2 == 0)
    return out, again, mean * out, variance


def _lstm_cell(pool: Pool, a: int, b: int, c: int) -> Any:
    x = _square(pool, a)
    weight = _square(pool, b).repeat(4, 1)
    return torch.lstm_cell(x, (x, x.sin()), weight, weight * 0.5)


def _lone_generator(pool: Pool, a: int, b: int, c: int) -> Any:
    generator = torch.Generator().manual_seed(c)
    noise = torch.rand(4, 4, generator=generator)
    return noise * _square(pool, a), torch.bernoulli(noise.clone(), generator=generator)


def _separate_counters(split: Callable[[Tensor], Any]) -> Operator:
    """Change one of several pieces of a storage that do not share a version counter, then use all of them."""

    def operator(pool: Pool, a: int, b: int, c: int) -> Any:
        base = at(pool, a).sin()
        if base.dim() == 0:
            return ()
        pieces = split(base)
        used = [piece * at(pool, b).sum() for piece in pieces]
        pieces[c % len(pieces)].mul_(0.5)
        return (*used, *pieces, base)

    return operator


def _change_data(pool: Pool, a: int, b: int, c: int) -> Any:
    base = at(pool, a) * 1.5
    base.data.mul_(1.25)
    return base.cos(), base


def _change_detached(pool: Pool, a: int, b: int, c: int) -> Any:
    base = at(pool, a) * 1.5
    before = base.tanh() if c % 2 else base.sin()
    base.detach().mul_(1.25)
    return before, base.cos(), base


def _attention(pool: Pool, a: int, b: int, c: int) -> Any:
    q, k = (fit(real(at(pool, i)), 1, 2, 4, 4) for i in (a, b))
    return F.scaled_dot_product_attention(q, k, k * q, dropout_p=0.2 if c % 2 else 0.0, is_causal=c % 3 == 0)


_VIEWS: dict[str, Operator] = {
    "transpose": _unary(lambda t: t.transpose(0, -1) if t.dim() else t),
    "slice": lambda p, a, b, c: at(p, a)[b % 2 :: 1 + c % 2] if at(p, a).dim() else (),
    "narrow last": lambda p, a, b, c: at(p, a)[..., : 1 + b % 3] if at(p, a).dim() else (),
    "reshape": _unary(lambda t: t.reshape(-1)),
    "unsqueeze and expand": _unary(lambda t: t.reshape(-1)[:6].unsqueeze(0).expand(3, -1)),
    "strided": lambda p, a, b, c: _strided(at(p, a), b, c),
    "unfold": _unary(lambda t: t.reshape(-1).unfold(0, 3, 1)[:5] if t.numel() > 3 else t),
    "diagonal": _on_square(lambda t: t.diagonal()),
    "unbind": _on_square(lambda t: t.unbind(0)[:2]),
    "chunk": _on_square(lambda t: t.chunk(2, dim=1)),
    "split": _on_square(lambda t: t.split([1, 3])),
    "unsafe chunk": _on_square(lambda t: torch.unsafe_chunk(t, 2)),
    "unsafe split": _on_square(lambda t: torch.unsafe_split(t, 2, dim=1)),
    "detach": _unary(lambda t: t.detach()),
    "data": _unary(lambda t: t.data),
    "alias": _unary(lambda t: torch.ops.aten.alias(t)),
    "as complex": _on_square(lambda t: torch.view_as_complex(t.contiguous().view(2, 4, 2))),
    "conj": _unary(lambda t: t.conj()),
    "imag of conj": _unary(lambda t: t.conj().imag if t.is_complex() else t.neg()),
    "real": _unary(real),
}

_RETURN_INPUT: dict[str, Operator] = {
    "contiguous": _unary(lambda t: t.contiguous()),
    "to itself": _unary(lambda t: t.to(t.dtype)),
    "no dropout": _unary(lambda t: F.dropout(t, 0.5, training=False)),
    "lift fresh": _unary(lambda t: torch.ops.aten.lift_fresh(t)),
    "unsafe view": lambda p, a, b, c: torch.matmul(fit(real(at(p, a)), 2, 2, 4), _square(p, b)),
}

_PLAIN: dict[str, Operator] = {
    "sin": _unary(torch.sin),
    "tanh": _unary(torch.tanh),
    "sigmoid": _unary(torch.sigmoid),
    "multiply": _binary(torch.mul),
    "add": _binary(torch.add),
    "divide": _binary(lambda x, y: x / (y * y.conj() + 1.5)),
    "softmax": _on_square(lambda t: t.softmax(-1)),
    "gelu": _on_square(F.gelu),
    "relu": _on_square(F.relu),
    "mm": _on_squares(torch.mm),
    "addmm": _on_squares(lambda x, y: torch.addmm(x, x, y, alpha=0.3)),
    "layer norm": _on_squares(lambda x, y: F.layer_norm(x, (4,), y[0])),
    "cat": _binary(lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)])[:LIMIT]),
    "stack": _on_squares(lambda x, y: torch.stack([x, y])),
    "where": _on_squares(lambda x, y: torch.where(x > 0, x, y.cos())),
    "gather": _on_squares(lambda x, y: x.gather(0, y.argsort(0))),
    "cumsum": _on_square(lambda t: t.cumsum(0).tanh()),
    "masked": _on_square(lambda t: t[t > 0]),
    "bf16": _on_square(lambda t: (t.bfloat16() * 3).float()),
    "double": _on_square(lambda t: t.double().exp().sigmoid().float()),
    "conv": _on_squares(lambda x, y: F.conv1d(x[None], y[:, :, None])[0]),
    "embedding": _on_squares(lambda x, y: F.embedding((y > 0).long(), x)[0]),
    "attention": _attention,
    "sum": _unary(lambda t: t.sum()),
    "clone": _unary(lambda t: t.clone()),
}

_SEVERAL: dict[str, Operator] = {
    "sort": _on_square(lambda t: (t.sort(0).values, t.topk(2).values)),
    "max": _on_square(lambda t: t.max(0).values),
    "variance": _on_square(lambda t: torch.var_mean(t, 1)),
    "batch norm": _batch_norm,
    "lstm cell": _lstm_cell,
    "two outputs": lambda p, a, b, c: TwoOutputs.apply(_square(p, a), _square(p, b)),
    "pool": _on_square(lambda t: F.max_pool1d(t[None], 2)[0]),
    "qr": _on_square(lambda t: torch.linalg.qr(t + 3 * torch.eye(4))),
}

_RANDOM: dict[str, Operator] = {
    "dropout": _unary(lambda t: F.dropout(t, 0.4)),
    "noise": _unary(lambda t: t * torch.rand_like(real(t))),
    "normal": _on_square(lambda t: torch.normal(t, 0.1)),
    "permute": _on_square(lambda t: t[torch.randperm(4)]),
    "alpha dropout": _on_square(lambda t: F.alpha_dropout(t, 0.3, training=True)),
    "own generator": _lone_generator,
    "dropout in place": _in_place(lambda t: F.dropout(t, 0.3, training=True, inplace=True)),
    "uniform in place": _in_place(lambda t: t.uniform_(-1, 1)),
    "bernoulli into": _on_square(lambda t: torch.empty_like(t).bernoulli_(0.5) * t),
    "noise into data": _in_place(lambda t: t.data.normal_()),
}

_FACTORIES: dict[str, Operator] = {
    "zeros": lambda p, a, b, c: torch.zeros(4, 4),
    "arange": lambda p, a, b, c: torch.arange(8.0) * at(p, a).sum(),
    "tensor": lambda p, a, b, c: torch.tensor([[0.5, c], [1.0, -1.0]]) * real(at(p, a)).sum(),
    "eye": lambda p, a, b, c: torch.eye(4) + _square(p, a),
    "full like": _unary(lambda t: torch.full_like(t, 0.3)),
    "numpy": lambda p, a, b, c: _of_numpy(c) * _square(p, a),
    "buffer": _into_buffer,
    "part of buffer": _into_part_of_buffer,
    "rows into buffer": _by_rows_or_columns,
    "out": _out,
}

_IN_PLACE: dict[str, Operator] = {
    "mul_": _in_place(lambda t: t.mul_(0.8)),
    "add_": _in_place_with(lambda t, u: t.add_(u)),
    "mul_ other": _in_place_with(lambda t, u: t.mul_(u)),
    "sin_": _in_place(lambda t: t.sin_()),
    "relu_": _in_place(torch.relu_),
    "sigmoid_": _in_place(lambda t: t.sigmoid_()),
    "copy_": _in_place_with(lambda t, u: t.copy_(u)),
    "zero_": _in_place(lambda t: t.zero_()),
    "copy part": _in_place_with(lambda t, u: t[..., :1].copy_(u[..., -1:].clone()) if t.dim() else None),
    "fill view": _in_place(lambda t: t.reshape(-1)[1:].fill_(0.5)),
    "addcmul_": _in_place_with(lambda t, u: t.addcmul_(u, u, value=0.1)),
    "addmm_": lambda p, a, b, c: _square(p, a).clone().addmm_(_square(p, b), _square(p, c)),
    "addmm_ of view": lambda p, a, b, c: [_square(p, a).addmm_(_square(p, b), _square(p, c))],
    "index put": _in_place(_index_put),
    "clamp_": _in_place(lambda t: t.clamp_(-0.5, 0.5)),
    "t_": lambda p, a, b, c: (_square(p, a) * 2).t_().mul_(0.5),
    "squeeze_": lambda p, a, b, c: at(p, a).unsqueeze(0).squeeze_(0),
    "data in place": _in_place(lambda t: t.data.mul_(0.5)),
    "detached in place": _in_place(lambda t: t.detach().mul_(0.9)),
    "no grad in place": torch.no_grad()(_in_place(lambda t: t.mul_(1.1))),
    "out of pool": _out_of_pool,
    "foreach": _foreach,
    "dirty": _in_place(lambda t: Dirty.apply(t)),
    "dirty fresh": _unary(lambda t: Dirty.apply(t.clone())),
    "unsafe chunk in place": _separate_counters(lambda t: torch.unsafe_chunk(t, 2)),
    "unsafe split in place": _separate_counters(lambda t: torch.unsafe_split(t, 1)),
    "change data": _change_data,
    "change detached": _change_detached,
    "detach_": lambda p, a, b, c: (at(p, a) * 2).detach_().mul_(3),
    "resize": lambda p, a, b, c: torch.zeros(2).resize_(4, 4).copy_(_square(p, a)),
}

OPERATORS: dict[str, Operator] = {
    **_VIEWS,
    **_RETURN_INPUT,
    **_PLAIN,
    **_SEVERAL,
    **_RANDOM,
    **_FACTORIES,
    **_IN_PLACE,
}
