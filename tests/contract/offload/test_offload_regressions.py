"""What once was wrong in offloading, one test each."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import on_device
import pytest
import torch
from offload_oracle import TwoTensor, flush, store_of_kind, two_tensor
from oracle import leaf

import actckpt


@pytest.fixture(autouse=True)
def _own_store() -> Iterator[None]:
    with store_of_kind("disk"):
        actckpt.reset_stats()
        yield


def _moved() -> int:
    return actckpt.stats().offloaded_bytes


# Wrong numbers.


def test_an_alias_with_a_version_counter_of_its_own_does_not_get_older_bytes() -> None:
    """`x.data` begins at version 0 again; the span of x at version 0 holds what x was before."""
    x, unused, weight = torch.randn(64), leaf(64), leaf(64)
    with actckpt.offload(min_bytes=0):
        not_in_backward = unused * x
        flush()
        x.add_(1)
        y = weight * x.data
    flush()
    y.sum().backward()
    assert torch.equal(weight.grad, x)
    del not_in_backward


def test_bytes_of_a_subclass_changed_in_place_are_not_taken_for_those_before() -> None:
    """The inner tensors' versions stay when the outer tensor is changed: in __torch_dispatch__ nothing counts."""
    x, unused, weight = two_tensor(16), two_tensor(16).requires_grad_(), two_tensor(16).requires_grad_()
    with actckpt.offload(min_bytes=0):
        not_in_backward = unused * x
        flush()
        x.add_(1)
        y = weight * x
    flush()
    (grad,) = torch.autograd.grad(y, weight, TwoTensor(torch.ones(16), torch.ones(16)))
    assert torch.equal(grad.a, x.a) and torch.equal(grad.b, x.b)
    del not_in_backward


@pytest.mark.parametrize("min_bytes", [None, 0, 1 << 20], ids=["plain", "moved", "kept"])
def test_a_subclass_changed_in_place_after_it_was_saved_raises(min_bytes: int | None) -> None:
    x, weight = two_tensor(16), two_tensor(16).requires_grad_()
    with nullcontext() if min_bytes is None else actckpt.offload(min_bytes=min_bytes):
        y = weight * x
    flush()
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(y, weight, TwoTensor(torch.ones(16), torch.ones(16)))


class _ChangesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return grad


def test_a_backward_that_changes_what_it_saved_does_not_change_what_others_saved() -> None:
    """Plain autograd raises at the other's unpack. Right gradients are as good; other numbers are not."""
    x = leaf(16)
    hidden = x * 1
    with actckpt.offload(min_bytes=0):
        y = hidden.sin() + _ChangesWhatItSaved.apply(hidden)
    flush()
    expected = hidden.detach().cos() + 1
    try:
        (grad,) = torch.autograd.grad(y.sum(), x)
    except RuntimeError as error:
        assert "inplace" in str(error)
    else:
        assert torch.equal(grad, expected)


# Programs that run plainly and fail here.


def test_a_module_with_a_sparse_buffer_runs() -> None:
    layer = torch.nn.Linear(4, 4)
    layer.register_buffer("adjacency", torch.eye(4).to_sparse())
    with actckpt.offload(min_bytes=0):
        y = layer(leaf(2, 4))
    y.sum().backward()


def test_a_module_under_vmap_runs() -> None:
    """torch.func.functional_call under vmap: parameters are batched tensors, which have no storage."""
    layer = torch.nn.Linear(4, 4)
    stacked = {name: torch.stack([value.detach()] * 3).requires_grad_() for name, value in layer.named_parameters()}

    def ensemble() -> list[torch.Tensor]:
        y = torch.func.vmap(lambda p, x: torch.func.functional_call(layer, p, (x,)).sin())(stacked, torch.ones(3, 5, 4))
        flush()
        return torch.autograd.grad(y.sum(), list(stacked.values()))

    expected = ensemble()
    with actckpt.offload(min_bytes=0):
        found = ensemble()
    assert all(map(torch.equal, found, expected))


def test_a_nested_tensor_of_the_strided_layout_runs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], requires_grad=True)
        with actckpt.offload(min_bytes=0):
            y = (nested * 2).sin()
        torch.nested.to_padded_tensor(y, 0.0).sum().backward()


def test_a_nested_tensor_of_the_jagged_layout_runs() -> None:
    """Its ragged size belongs to the offsets tensor by identity: rebuilt tensors do not match each other."""
    a, b = leaf(2, 4), leaf(3, 4)

    def program() -> torch.Tensor:
        nested = torch.nested.as_nested_tensor([a, b], layout=torch.jagged)
        return ((nested * 2).sin() * nested).values().sum()

    expected = torch.autograd.grad(program(), [a, b])
    with actckpt.offload(min_bytes=0):
        y = program()
    flush()
    assert all(map(torch.equal, torch.autograd.grad(y, [a, b]), expected))


def test_a_block_is_compiled_inside_the_context_without_a_warning() -> None:
    """A global module hook makes torch.compile warn, and fire it twice."""
    layer = torch.nn.Linear(8, 8)
    with actckpt.offload(min_bytes=0):
        y = torch.compile(layer, backend="aot_eager")(torch.randn(4, 8))
    y.sum().backward()


# What must stay was moved.


def test_inner_tensors_of_a_parameter_that_is_a_subclass_stay() -> None:
    """As of a DTensor parameter, or a quantised one."""
    weight = torch.nn.Parameter(two_tensor(16))
    x = two_tensor(16).requires_grad_()
    with actckpt.offload(min_bytes=0):
        y = x * weight
    assert _moved() == 0
    del y


class _Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(16, 16))
        self.frozen = torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        return x * self.scale if how == "buffer" else x @ self.frozen.t()


@pytest.mark.parametrize("is_applied", [True, False], ids=["applied block", "forward called as a method"])
@pytest.mark.parametrize("how", ["buffer", "view of a frozen parameter"])
def test_what_a_module_owns_itself_stays(how: str, is_applied: bool) -> None:
    """An applied block's own hooks have run when its forward opens the context: only its children are learnt."""
    model = torch.nn.ModuleList([_Scale(), _Scale()])
    if is_applied:
        actckpt.apply(model, policy="offload", blocks=_Scale, min_bytes=0)
        y = model[0](leaf(16, 16), how)
    else:
        with actckpt.offload(min_bytes=0):
            y = model[0].forward(leaf(16, 16), how)
    assert _moved() == 0
    del y


def test_a_view_of_a_frozen_parameter_stays_in_code_without_modules() -> None:
    weight = torch.nn.Parameter(torch.randn(16, 16), requires_grad=False)
    x = leaf(16, 16)
    with actckpt.offload(min_bytes=0):
        y = x * weight.t()
    assert _moved() == 0
    del y


def test_a_frozen_linear_layer_stays_under_apply() -> None:
    """LoRA: the frozen weight's transpose is what addmm saves."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).requires_grad_(False)
    actckpt.apply(model, policy="offload", blocks=torch.nn.Linear, min_bytes=0)
    y = model(leaf(4, 16))
    assert _moved() == 0
    del y


# Growth and lateness.


def test_a_context_around_the_training_loop_does_not_grow_with_the_steps() -> None:
    """Its lists of spans and sizes keep an entry per tensor ever saved; each backward walks all of them."""
    weight = leaf(4, 4)
    num_objects = []
    with actckpt.offload(min_bytes=0):
        for step in range(300):
            (weight @ torch.randn(4, 4)).sin().sum().backward()
            if step in (99, 299):
                gc.collect()
                num_objects.append(len(gc.get_objects()))
    assert num_objects[1] - num_objects[0] < 50


def test_what_was_written_is_freed_though_nothing_else_is_saved() -> None:
    """Less than 256 KiB would wait for more to come."""
    x, saved = leaf(66_250), torch.randn(66_250)
    alive = weakref.ref(saved.untyped_storage())
    with actckpt.offload(min_bytes=0):
        y = x * saved
    expected = saved.tolist()
    del saved
    deadline = time.monotonic() + 60
    while alive() is not None:
        assert time.monotonic() < deadline, "written, and still in memory after 60 s"
        time.sleep(0.001)
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == expected


@pytest.mark.parametrize("options", [{"offload_inputs": True}, {"policy": "offload"}])
def test_reading_ahead_reaches_into_the_next_block(options: dict[str, Any]) -> None:
    """Each block has a session of its own, and a session reads ahead within itself only."""
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(6)),
    )
    actckpt.apply(model, **options)
    for block in model:  # backward takes long, so that what is begun ahead arrives in time
        block.register_forward_hook(lambda _module, _args, y: y.register_hook(lambda _: time.sleep(0.02)) and None)
    behind = []
    with store_of_kind("disk" if on_device.device_type == "cpu" else "memory"):  # there no clock of the machine decides
        while len(behind) < 10 and min(behind, default=3) > 2:  # a busy machine may make it late all the same
            actckpt.reset_stats()
            y = model(leaf(512, 512) * 1)
            flush()
            y.sum().backward()
            figures = actckpt.stats()
            assert figures.prefetched_reloads + figures.late_reloads > 2
            not_ahead = figures.offloaded_bytes // (512 * 512 * 4) - figures.prefetched_reloads
            behind.append(figures.late_reloads if on_device.device_type == "cpu" else not_ahead)
    assert min(behind) <= 2, "only the first could not be known"
