"""Tensor subclasses in regions, policies and offloading: DTensor, tensors of collectives, quantized and masked ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from internals.stores import flush
from offload_oracle import TwoTensor
from oracle import Checkpoint, Saves, assert_equal, in_offload, in_region, plain
from torch.utils import _pytree

import actckpt
from actckpt.memory import LiveStorages

aten = torch.ops.aten


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Scaled(torch.Tensor):
    """Eight bits and a scale, as torchao's weights: dequantized by each operator, and views are quantized."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, bits: int, requires_grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=torch.float32, requires_grad=requires_grad
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bits: int, requires_grad: bool = False) -> None:
        self.codes, self.scale, self.bits = codes, scale, bits

    @staticmethod
    def of(x: torch.Tensor) -> Scaled:
        scale = x.detach().abs().max() / 100
        return Scaled((x.detach() / scale).round().to(torch.int8), scale, 8)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, bool]]:
        return ["codes", "scale"], (self.bits, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: tuple[int, bool], size: Any, stride: Any) -> Scaled:
        return Scaled(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.t.default, aten.alias.default):
            return Scaled(func(args[0].codes), args[0].scale, args[0].bits)
        args, kwargs = _pytree.tree_map_only(Scaled, lambda t: t.codes.float() * t.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class Meshed(TwoTensor):
    """Names, beside its tensors, something that is none; and nothing."""

    def __tensor_flatten__(self) -> Any:
        self.mesh, self.nothing = "a mesh", None
        return ["a", "mesh", "b", "nothing"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Meshed:
        assert (inner["mesh"], inner["nothing"]) == ("a mesh", None)
        return Meshed(inner["a"], inner["b"], size, stride)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = _pytree.tree_map_only(Meshed, lambda t: TwoTensor(t.a, t.b), (args, kwargs or {}))
        result = func(*unwrapped[0], **unwrapped[1])
        if func._schema.is_mutable:
            return args[0]
        return _pytree.tree_map_only(TwoTensor, lambda t: Meshed(t.a, t.b), result)


def _distributed(mesh: Any, x: torch.Tensor, *, is_split: bool = True) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(x, mesh, [Shard(0) if is_split else Replicate()])


def _async(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(torch.ops._c10d_functional.all_reduce(x, "sum", mesh.get_group().group_name))


class _Saves(Saves):
    """Multiplies the gradient with what was saved, which is of the same kind as before."""

    @staticmethod
    def forward(ctx: Any, x: Any, saved: Any) -> Any:
        ctx.kind = type(saved)
        return Saves.forward(ctx, x, saved)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (saved,) = ctx.saved_tensors
        assert type(saved) is ctx.kind
        return grad * _plain(saved), None


def _plain(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, TwoTensor):
        return _plain(tensor.a) + _plain(tensor.b)
    if isinstance(tensor, Scaled):
        return tensor.codes.float() * tensor.scale
    if hasattr(tensor, "to_local"):
        return _plain(tensor.to_local())
    if hasattr(tensor, "trigger_wait"):
        return _plain(tensor.trigger_wait())
    if hasattr(tensor, "get_data"):
        return tensor.get_data().masked_fill(~tensor.get_mask(), 0)
    return torch.clone(tensor.as_subclass(torch.Tensor))


def _masked(x: torch.Tensor) -> torch.Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(x, x > 0)


class Named(torch.Tensor):
    """A subclass that does nothing and cannot be taken apart."""


KINDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "distributed": _distributed,
    "replicated": lambda mesh, x: _distributed(mesh, x, is_split=False),
    "of a collective": _async,
    "distributed, of a collective": lambda mesh, x: _from_local(mesh, _async(mesh, x)),
    "two tensors": lambda mesh, x: TwoTensor(x, x.sin()),
    "nested": lambda mesh, x: TwoTensor(TwoTensor(x, x.cos()), TwoTensor(x.sin(), x * 2)),
    "names what is no tensor": lambda mesh, x: Meshed(x, x.sin()),
    "quantized": lambda mesh, x: Scaled.of(x),
    "without flatten": lambda mesh, x: x.clone().as_subclass(Named),
    "masked": lambda mesh, x: _masked(x),
}


def _from_local(mesh: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()])


METHODS: dict[str, Checkpoint] = {
    "recompute": in_region(),
    "keep matmuls": in_region([aten.mm]),
    "offload policy": in_region("offload"),
    "offload matmuls": in_region(actckpt.policies.PerOp({aten.mm: "offload"}, default="recompute")),
    "offload": in_offload(),
    "region in offload": in_offload(in_region()),
}

pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs a torch that is built with gloo"
    ),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_function_gets_back_the_subclass_that_it_saved(kind: str, method: str, mesh: Any) -> None:
    def program(method: Checkpoint) -> Any:
        torch.manual_seed(3)
        x, values = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
        y = method(lambda x: _Saves.apply(x.sin(), KINDS[kind](mesh, values * 1)).exp(), x)
        flush()
        return torch.autograd.grad(y.sum(), x)

    expected = program(plain)
    for _ in range(2):
        assert_equal(program(METHODS[method]), expected)


def _matmuls(mesh: Any, kind: str, method: Checkpoint) -> Any:
    torch.manual_seed(3)
    make = KINDS[kind]
    x = make(mesh, torch.randn(6, 8)).requires_grad_()
    w = torch.nn.Parameter(make(mesh, torch.randn(8, 8)))
    found = []
    for _ in range(2):
        y = method(lambda x, w: torch.mm((x * 2).sin(), w.t()).exp().tanh(), x, w)
        flush()
        found += torch.autograd.grad(y, [x, w], torch.ones_like(y))
        with torch.no_grad():
            w.mul_(0.5)
    return [_plain(grad) for grad in found]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["distributed", "replicated", "two tensors", "nested", "names what is no tensor"])
def test_gradients_of_operators_on_subclasses_are_those_of_plain_autograd(kind: str, method: str, mesh: Any) -> None:
    assert_equal(_matmuls(mesh, kind, METHODS[method]), _matmuls(mesh, kind, plain))


@pytest.mark.parametrize("kind", ["distributed", "two tensors", "nested", "names what is no tensor"])
def test_checkpoints_of_subclasses_hold_and_move_their_inputs(kind: str, mesh: Any) -> None:
    def program(function: Callable[..., Any]) -> Any:
        torch.manual_seed(3)
        x = KINDS[kind](mesh, torch.randn(6, 8)).requires_grad_()
        y = function(lambda h: h.sin().exp(), x * 2)
        return _plain(torch.autograd.grad(y, x, torch.ones_like(y))[0])

    expected = program(plain)
    assert_equal(program(actckpt.checkpoint), expected)
    assert_equal(program(partial(actckpt.checkpoint, offload_inputs=True)), expected)
    assert_equal(program(partial(actckpt.checkpoint, actckpt.checkpoint)), expected)


@pytest.mark.parametrize("is_through_a_view", [False, True])
@pytest.mark.parametrize("kind", ["a plain tensor", "distributed", "two tensors", "nested"])
def test_a_subclass_that_replay_reads_and_that_changed_after_the_region_raises(
    kind: str, is_through_a_view: bool, mesh: Any
) -> None:
    """An operator in place moves the version of the outer tensor, and none of those that it is made of."""
    make = KINDS.get(kind, lambda mesh, x: x)
    x, w = make(mesh, torch.randn(64, 1)).requires_grad_(), make(mesh, torch.randn(64, 1)) * 1
    scale = w.t() if is_through_a_view else w
    with actckpt.region():
        y = (x.detach() * (scale if is_through_a_view else scale.t()) + x).exp()  # replayed from w
    plain = (x.detach() * w.t() + x).exp()
    expected = torch.autograd.grad(plain, x, torch.ones_like(plain))[0]
    del scale, plain
    w.mul_(3)
    if kind == "distributed" and torch.__version__ < (2, 10):  # gathers w there, and what it gathered stays
        assert_equal(_plain(torch.autograd.grad(y, x, torch.ones_like(y))[0]), _plain(expected))
        return
    with pytest.raises(actckpt.errors.SavedTensorChangedError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, torch.ones_like(y))


@pytest.mark.parametrize("kind", ["distributed", "two tensors"])
def test_a_subclass_that_changes_inside_of_the_region_is_replayed_from_what_it_was(kind: str, mesh: Any) -> None:
    def function(x: Any, w: Any) -> Any:
        y = (x.detach() * w.t() + x).exp()
        w.mul_(3)
        return y + (x.detach() * w.t() + x).exp()

    def program(method: Checkpoint) -> Any:
        torch.manual_seed(3)
        x, w = KINDS[kind](mesh, torch.randn(64, 1)).requires_grad_(), KINDS[kind](mesh, torch.randn(64, 1)) * 1
        y = method(function, x, w)
        return _plain(torch.autograd.grad(y, x, torch.ones_like(y))[0])

    assert_equal(program(in_region()), program(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_live_storages_count_what_a_subclass_is_made_of(kind: str, mesh: Any) -> None:
    values = torch.randn(6, 8)
    with LiveStorages() as live:
        made = KINDS[kind](mesh, values * 1)
        _plain(made)  # waits for collectives, which hold their results
        assert live.live_bytes > 0
    del made
    gc.collect()  # a masked tensor refers to itself
    assert live.live_bytes == 0


@pytest.mark.parametrize("method", ["offload", "offload policy"])
def test_what_a_collective_still_writes_is_waited_for_before_it_is_moved(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    values = torch.randn(6, 8)

    def write(tensor: Any) -> torch.Tensor:
        tensor.elem.data.copy_(values)
        return tensor.elem

    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", write)
    x = torch.randn(6, 8, requires_grad=True)
    y = METHODS[method](lambda x: _Saves.apply(x, AsyncCollectiveTensor(torch.zeros(6, 8))), x)
    flush()
    monkeypatch.setattr(AsyncCollectiveTensor, "trigger_wait", lambda tensor: tensor.elem)
    assert_equal(torch.autograd.grad(y.sum(), x)[0], values)
