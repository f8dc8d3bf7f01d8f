"""Programs that save tensors of every layout and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's name

Program = Callable[[torch.Tensor], torch.Tensor]


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


def _part_in_place(h: torch.Tensor) -> torch.Tensor:
    copy = (h * 2).clone()
    copy[0].mul_(3)
    return copy.exp()


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
    "the input itself": lambda h: (h * h).sum() + (h * h.sin()).sum(),
    "chunks": lambda h: sum((part * part.exp()).mean() for part in (h @ h).tanh().chunk(4, dim=1)),
    "views of one storage": lambda h: (h * h.t() + h[0] * h[:, 1:2].exp()).sum() + h.view(64).sin().sum(),
    "in place on a part": lambda h: _part_in_place(h).sin().sum(),
    "activations": lambda h: (h.sin().exp() * h.tanh().sigmoid()).sum(),
    "transposes": lambda h: (h.T.sin() @ h.T.contiguous().T.cos().mT).softmax(-1).square().sum(),
    "slices with steps": lambda h: (h[::2, 1::3].sin() * h[1::2, ::3].cos()).sum(),
    "offsets of odd size": lambda h: (h.flatten()[1:50].view(7, 7) @ h.flatten()[3:52].view(7, 7).sin()).exp().mean(),
    "channels last": _channels_last,
    "expanded": lambda h: (h.sum(1)[:, None].expand(8, 300).sin() * h.mean().expand(8, 300)).sum(),
    "expanded twice over": lambda h: (h[None, :, :1].expand(5, 8, 8) @ h.expand(5, 8, 8).sin()).sum(),
    "overlapping views": _overlapping_views,
    "a complex view over a part": lambda h: (
        h[:4].sin().sum() + torch.view_as_complex(h.view(-1, 2)[8:24]).abs().sum() + h.view(-1, 4)[2:, 1:3].exp().sum()
    ),
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
