"""Operators on the simulated device give what they give on the CPU, bit for bit, and so do their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

IN, OUT = (5, 6), (6, 5)
QKV = ((2, 4, 16, 8),) * 3

#: A function, and the shapes of its tensors.
OPERATORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add": (torch.add, (IN, (6,))),
    "scalars": (lambda x: 2.5 * x + 1 - x / 3, (IN,)),
    "matmul": (torch.matmul, ((3, *IN), (3, *OUT))),
    "linear": (F.linear, ((2, *IN), (5, 6), (5,))),
    "addmm": (torch.addmm, ((5,), IN, OUT)),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), ((2, *IN), (2, *OUT))),
    "softmax": (lambda x: x.softmax(-1), (IN,)),
    "log_softmax": (lambda x: x.log_softmax(-1), (IN,)),
    "logsumexp": (lambda x: x.logsumexp(1), (IN,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (IN, (6,), (6,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (IN, (6,))),
    "group_norm": (lambda x: F.group_norm(x, 2), ((2, 4, 5),)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), ((6, 4, 5),)),
    "gelu": (F.gelu, (IN,)),
    "silu": (F.silu, (IN,)),
    "conv1d": (F.conv1d, ((2, 3, 20), (5, 3, 3), (5,))),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2), ((2, 3, 20, 20), (8, 3, 3, 3), (8,))),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 3, 9, 9), (3, 4, 3, 3))),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=4), ((2, 4, 9, 9), (4, 1, 3, 3))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), ((2, 3, 8, 8),)),
    "adaptive_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), ((2, 3, 8, 8),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((2, 3, 8, 8),)),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 2], [3, 1]], device=w.device), w), (IN,)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3, 2, 1], device=x.device)), (IN,)),
    "mse_loss": (F.mse_loss, (IN, IN)),
    "bce": (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), (IN,)),
    "attention": (F.scaled_dot_product_attention, QKV),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), QKV),
    "masked": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), (*QKV, (16, 16))),
    "index": (lambda x: x[torch.tensor([2, 0], device=x.device)], (IN,)),
    "index_of_the_cpu": (lambda x: x[torch.tensor([2, 0])], (IN,)),
    "mask": (lambda x: x[x > 0], (IN,)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 3.0), (IN,)),
    "where": (lambda x: torch.where(x > 0, x, -x), (IN,)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0], [1], [2], [0], [1]], device=x.device)), (IN,)),
    "scatter_add": (lambda x: x.scatter_add(1, torch.zeros(5, 6, dtype=torch.long, device=x.device), x), (IN,)),
    "index_put": (
        lambda x: x.clone().index_put_((torch.tensor([1], device=x.device),), torch.ones(1, 6, device=x.device)),
        (IN,),
    ),
    "topk": (lambda x: x.topk(2)[0], (IN,)),
    "sort": (lambda x: x.sort()[0], (IN,)),
    "cat": (lambda x, y: torch.cat([x, y]), (IN, IN)),
    "chunk": (lambda x: [part * 2 for part in x.chunk(2, -1)], (IN,)),
    "unbind": (lambda x: list(x.unbind(0)), (IN,)),
    "cumsum": (lambda x: x.cumsum(0), (IN,)),
    "var_mean": (lambda x: torch.var_mean(x, 0), (IN,)),
    "norm": (lambda x: x.norm(), (IN,)),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * 2), ((5, 2),)),
    "conj_matmul": (
        lambda x: torch.view_as_real(torch.view_as_complex(x).conj() @ torch.view_as_complex(x).mT),
        ((4, 3, 2),),
    ),
    "svd": (lambda x: torch.linalg.svd(x, full_matrices=False)[1], (IN,)),
    "solve": (torch.linalg.solve, ((4, 4), (4, 2))),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.mT + 4 * torch.eye(5, device=x.device)), (IN,)),
    "pad": (lambda x: F.pad(x, (1, 1), mode="reflect"), ((2, 3, 4),)),
    "roll": (lambda x: x.roll(1).flip(0), (IN,)),
    "expand": (lambda x: x.expand(4, 5, 6).contiguous(), (IN,)),
    "permute": (lambda x: x.permute(2, 0, 1).reshape(4, -1), ((2, 3, 4),)),
    "repeat": (lambda x: x.repeat(2, 2).repeat_interleave(2, 0).tril(), (IN,)),
    "unfold": (lambda x: F.unfold(x, 2), ((1, 2, 4, 4),)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), ((1, 2, 4, 4), (1, 3, 3, 2))),
    "bfloat16": (lambda x, y: (x.bfloat16() @ y.bfloat16()).float(), (IN, OUT)),
    "half": (lambda x, y: (x.half() @ y.half()).float(), (IN, OUT)),
    "cdist": (torch.cdist, (IN, IN)),
    "fft": (lambda x: torch.fft.rfft(x).abs(), (IN,)),
}


def _outcome(function: Callable[..., Any], inputs: list[Tensor], device: str) -> list[Tensor]:
    own = [value.detach().clone().to(device).requires_grad_() for value in inputs]
    found = function(*own)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    weights = [torch.arange(output.numel(), device=device).view(output.shape).cos() for output in outputs]
    loss = sum((output.float() * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    assert isinstance(loss, Tensor)
    everything = [*outputs, *torch.autograd.grad(loss, own)]
    assert all(value.device.type == device for value in everything)
    return [value.detach().cpu() for value in everything]


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_their_gradients_are_those_of_the_cpu(name: str) -> None:
    function, shapes = OPERATORS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    expected, found = _outcome(function, inputs, "cpu"), _outcome(function, inputs, "sim")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_tensors_of_two_devices_are_refused_but_for_scalars_and_indices() -> None:
    ours = torch.ones(3, device="sim:0")
    for other in (torch.ones(3), torch.ones(3, device="sim:1")):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            ours + other
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2, 2]
    assert torch.ones(3, device="sim:1").copy_(ours * 2).tolist() == [2, 2, 2]


def test_results_may_be_written_into_tensors_that_grow() -> None:
    target = torch.empty(0, device="sim")
    torch.add(torch.ones(4, 4, device="sim"), 1, out=target)
    assert target.shape == (4, 4) and target.sum().item() == 32
    values, places = torch.empty(0, device="sim"), torch.empty(0, device="sim", dtype=torch.long)
    torch.max(target, 1, out=(values, places))
    assert values.tolist() == [2, 2, 2, 2]


def test_views_share_bytes_and_versions() -> None:
    base = torch.zeros(4, 4, device="sim")
    view = base[1:3].t()
    view.add_(1)
    assert view._base is base and base._version == 1 and base.sum().item() == 8
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    base.unsqueeze_(0)
    assert base.shape == (1, 4, 4)


def test_storages_are_resized_and_shared() -> None:
    tensor = torch.arange(4.0, device="sim")
    storage = tensor.untyped_storage()
    storage.resize_(32)
    assert tensor.tolist() == [0, 1, 2, 3]
    other = torch.empty(0, device="sim").set_(storage, 0, (2, 2), (2, 1))
    assert other.data_ptr() == tensor.data_ptr() and other.tolist() == [[0, 1], [2, 3]]
    storage.resize_(0)
    assert storage.nbytes() == 0
    other.set_(torch.ones(3, device="sim"))
    assert other.tolist() == [1, 1, 1]
    tensor = torch.ones(2, device="sim")
    tensor.resize_(3, 3).fill_(2)
    assert tensor.untyped_storage().nbytes() == 36 and tensor.sum().item() == 18


def test_numpy_has_no_device_memory() -> None:
    with pytest.raises(TypeError):
        torch.ones(2, device="sim").numpy()


def test_the_cpu_allocates_as_before() -> None:
    torch.ones(4, device="sim") @ torch.ones(4, device="sim")
    before = torch.sim.memory_allocated()
    kept = [torch.ones(1000) @ torch.ones(1000, 3) for _ in range(5)]
    assert torch.sim.memory_allocated() == before and all(value.device.type == "cpu" for value in kept)
