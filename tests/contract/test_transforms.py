"""Inside of transforms of `torch.func`, `make_fx` and `torch.export`, and over parts of sparse tensors: as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_equal, in_offload, in_region, plain
from residual_mlp import Mlp
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointError

import actckpt
from actckpt.policies import PerOp

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning", "ignore:Sparse")

_aten = torch.ops.aten
_SIZE = 400_000  # more than what is too small to be moved

Body = Callable[..., Tensor]


_OFFLOADED_SINES = PerOp({_aten.sin.default: "offload"}, default="recompute")
#: Around a body.
METHODS: dict[str, Callable[[Body], Body]] = {
    name: partial(partial, method)
    for name, method in {
        "recompute": in_region(),
        "list": in_region([_aten.mul.Tensor]),
        "PerOp": in_region(_OFFLOADED_SINES),
        "all offloaded": in_region(PerOp({}, default="offload")),
        "offload": in_offload(),
        "checkpoint with PerOp": partial(actckpt.checkpoint, policy=_OFFLOADED_SINES),
    }.items()
}


def _body(x: Tensor, w: Tensor) -> Tensor:
    return ((x.sin() * 2) * w).exp().cos() * w.sin()


def _leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(_SIZE).requires_grad_(), torch.rand(_SIZE).requires_grad_(), torch.rand(_SIZE)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Callable[[Body], Body]:
    return METHODS[request.param]


def _jvp(body: Body, x: Tensor, w: Tensor, tangent: Tensor) -> Any:
    found = torch.func.jvp(body, (x, w), (tangent, torch.zeros(_SIZE)))
    return found, torch.autograd.grad((found[0] * found[1]).sum(), (x, w))


def _jvp_with_zero_tangent(body: Body, x: Tensor, w: Tensor, tangent: Tensor) -> Any:
    found = torch.func.jvp(lambda x: body(x, w), (x,), (tangent,))
    return found, torch.autograd.grad((found[0] * found[1]).sum(), (x, w))


def _tangents_of_gradients(body: Body, x: Tensor, w: Tensor, tangent: Tensor) -> list[Tensor]:
    with forward_ad.dual_level():
        gradients = torch.autograd.grad(body(forward_ad.make_dual(x, tangent), w).sum(), (x, w))
        return [part.clone() for gradient in gradients for part in forward_ad.unpack_dual(gradient)]


@pytest.mark.parametrize("run", [_jvp, _jvp_with_zero_tangent, _tangents_of_gradients])
def test_tangents_and_their_gradients(method: Callable[[Body], Body], run: Callable[..., Any]) -> None:
    for _ in range(2):
        assert_equal(run(method(_body), *_leaves()), run(_body, *_leaves()))


def test_make_fx_traces_forward_and_backward(method: Callable[[Body], Body]) -> None:
    def step(body: Body, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(body(x, w).sum(), (x, w))

    x, w, other = _leaves()
    traced = make_fx(partial(step, method(_body)))(x, w)
    for first, second in ((x, w), (other, x)):
        assert_equal(traced(first, second), step(_body, first, second))


def _sparse(layout: str) -> Callable[[Tensor], Tensor]:
    def body(x: Tensor) -> Tensor:
        made = getattr(x * 2, layout)()
        values: Tensor = (made.coalesce() if layout == "to_sparse" else made).values()
        return values.exp().sin()

    return body


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_values_of_sparse_tensors(method: Callable[[Body], Body], layout: str) -> None:
    def run(body: Body) -> Tensor:
        torch.manual_seed(0)
        x = torch.rand(5, 5).requires_grad_()
        body(x).sum().backward()
        assert x.grad is not None
        return x.grad

    for _ in range(2):
        assert_equal(run(method(_sparse(layout))), run(_sparse(layout)))


class _Block(torch.nn.Module):
    def __init__(self, wrap: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp, self.wrap = Mlp(8), wrap

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(self.mlp.forward, x)


def _blocks(wrap: Callable[[Body, Tensor], Tensor] = plain) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(_Block(wrap) for _ in range(3)))


def _operators(model: torch.nn.Module, *, strict: bool) -> list[Any]:
    nodes = torch.export.export(model, (torch.ones(4, 8),), strict=strict).graph.nodes
    return [node.target for node in nodes if node.op == "call_function"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("options", [{}, {"policy": "matmuls"}, {"activation_budget": "90%"}], ids=str)
def test_export_sees_the_plain_model(options: dict[str, Any], strict: bool) -> None:
    model = _blocks()
    actckpt.apply(model, **options)
    for _ in range(2):  # a budget has a plan then
        model(torch.ones(4, 8)).sum().backward()
    assert _operators(model, strict=strict) == _operators(_blocks(), strict=strict)


def test_export_of_code_with_checkpoints_and_regions_sees_plain_code() -> None:
    for strict, wrap in ((False, actckpt.checkpoint), (True, actckpt.checkpoint), (False, in_region())):
        assert _operators(_blocks(wrap), strict=strict) == _operators(_blocks(), strict=strict)


_TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x),
    "jacrev": torch.func.jacrev,
    "hessian": torch.func.hessian,
}
_METHODS = {**METHODS, "rerun": partial(partial, actckpt.checkpoint)}


@pytest.mark.parametrize("transform", _TRANSFORMS.values(), ids=_TRANSFORMS)
@pytest.mark.parametrize("name", _METHODS)
def test_transforms_that_take_no_hooks_are_one_clear_error(name: str, transform: Any) -> None:
    call = _METHODS[name](lambda x: x.sin().sum())
    with pytest.raises(CheckpointError, match=r"^\w+: torch\.func\.grad.* Use torch\.autograd\."):
        transform(call)(torch.ones(4, requires_grad=True))
    x = torch.ones(4, requires_grad=True)  # and nothing is left behind
    assert_equal(torch.autograd.grad(call(x), x), (x.detach().cos(),))


def test_a_transform_inside_of_a_rerun_that_takes_no_hooks_is_one_clear_error() -> None:
    with pytest.raises(CheckpointError, match=r"^checkpoint: torch\.func\.grad"):
        actckpt.checkpoint(torch.func.grad(lambda x: x.sin().sum()), torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("name", _METHODS)
def test_other_transforms_run_as_without(name: str) -> None:
    x = torch.rand(3, 4)
    for transform in (torch.func.vmap, torch.func.jacfwd):
        assert_equal(transform(_METHODS[name](torch.sin))(x), transform(torch.sin)(x))


def test_backward_of_the_results_of_vmap_needs_a_policy() -> None:
    x, w = torch.rand(3, 4), torch.rand(4, requires_grad=True)
    expected = torch.autograd.grad((x * w).sin().sum(), w)
    found = torch.func.vmap(lambda row: actckpt.checkpoint(lambda: (row * w).sin(), policy=[]))(x)
    assert_equal(torch.autograd.grad(found.sum(), w), expected)


def test_apply_with_a_policy_inside_of_vmap() -> None:
    x, block = torch.rand(2, 3, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    expected = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    actckpt.apply(model := torch.nn.Sequential(block), "matmuls", blocks=["0"])
    for _ in range(2):
        found = torch.autograd.grad(torch.func.vmap(model)(x).sum(), list(block.parameters()))
        torch.testing.assert_close(found, expected)
