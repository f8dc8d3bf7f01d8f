"""Inside of transforms of `torch.func`, `make_fx` and `torch.export`, and over parts of sparse tensors: as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_equal
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


def _in_region(policy: Any) -> Callable[[Body], Body]:
    def wrapped(body: Body) -> Body:
        def run(*tensors: Tensor) -> Tensor:
            with actckpt.region(policy):
                return body(*tensors)

        return run

    return wrapped


def _in_offload(body: Body) -> Body:
    def run(*tensors: Tensor) -> Tensor:
        with actckpt.offload(min_bytes=0):
            return body(*tensors)

    return run


METHODS: dict[str, Callable[[Body], Body]] = {
    "recompute": _in_region("recompute"),
    "list": _in_region([_aten.mul.Tensor]),
    "PerOp": _in_region(PerOp({_aten.sin.default: "offload"}, default="recompute")),
    "all offloaded": _in_region(PerOp({}, default="offload")),
    "offload": _in_offload,
    "checkpoint with PerOp": lambda body: (
        lambda *tensors: actckpt.checkpoint(
            body, *tensors, policy=PerOp({_aten.sin.default: "offload"}, default="recompute")
        )
    ),
}


def _body(x: Tensor, w: Tensor) -> Tensor:
    return ((x.sin() * 2) * w).exp().cos() * w.sin()


def _leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(_SIZE).requires_grad_(), torch.rand(_SIZE).requires_grad_(), torch.rand(_SIZE)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Callable[[Body], Body]:
    return METHODS[request.param]


@pytest.mark.parametrize("has_zero_tangent", [True, False])
def test_tangents_of_jvp_and_their_gradients(method: Callable[[Body], Body], has_zero_tangent: bool) -> None:
    def run(body: Body) -> Any:
        x, w, tangent = _leaves()
        if has_zero_tangent:
            found = torch.func.jvp(lambda x: body(x, w), (x,), (tangent,))
        else:
            found = torch.func.jvp(body, (x, w), (tangent, torch.zeros(_SIZE)))
        return found, torch.autograd.grad((found[0] * found[1]).sum(), (x, w))

    for _ in range(2):
        assert_equal(run(method(_body)), run(_body))


def test_gradients_have_their_tangents(method: Callable[[Body], Body]) -> None:
    def run(body: Body) -> list[Tensor]:
        x, w, tangent = _leaves()
        with forward_ad.dual_level():
            y = body(forward_ad.make_dual(x, tangent), w)
            gradients = torch.autograd.grad(y.sum(), (x, w))
            return [part.clone() for gradient in gradients for part in forward_ad.unpack_dual(gradient)]

    for _ in range(2):
        assert_equal(run(method(_body)), run(_body))


def test_make_fx_traces_forward_and_backward(method: Callable[[Body], Body]) -> None:
    def step(body: Body) -> Callable[..., tuple[Tensor, ...]]:
        def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
            return torch.autograd.grad(body(x, w).sum(), (x, w))

        return run

    x, w, other = _leaves()
    traced = make_fx(step(method(_body)))(x, w)
    for first, second in ((x, w), (other, x)):
        assert_equal(traced(first, second), step(_body)(first, second))


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
    def __init__(self, wrap: Callable[[Body, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.wrap = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8), wrap

    def _body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self._body(x) if self.wrap is None else self.wrap(self._body, x)


def _blocks(wrap: Callable[[Body, Tensor], Tensor] | None = None) -> torch.nn.Module:
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


def _run_in_region(body: Body, x: Tensor) -> Tensor:
    with actckpt.region():
        return body(x)


def test_export_of_code_with_checkpoints_and_regions_sees_plain_code() -> None:
    for strict, wrap in ((False, actckpt.checkpoint), (True, actckpt.checkpoint), (False, _run_in_region)):
        assert _operators(_blocks(wrap), strict=strict) == _operators(_blocks(), strict=strict)


_TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda x: torch.func.vjp(f, x),
    "jacrev": torch.func.jacrev,
    "hessian": torch.func.hessian,
}
_METHODS = {**METHODS, "rerun": lambda body: lambda *tensors: actckpt.checkpoint(body, *tensors)}


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


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacfwd], ids=["vmap", "jacfwd"])
@pytest.mark.parametrize("name", _METHODS)
def test_other_transforms_run_as_without(name: str, transform: Any) -> None:
    x = torch.rand(3, 4)
    assert_equal(transform(_METHODS[name](torch.sin))(x), transform(torch.sin)(x))


def test_backward_of_the_results_of_vmap_needs_a_policy() -> None:
    x, w = torch.rand(3, 4), torch.rand(4, requires_grad=True)
    expected = torch.autograd.grad((x * w).sin().sum(), w)
    found = torch.func.vmap(lambda row: actckpt.checkpoint(lambda: (row * w).sin(), policy=[]))(x)
    assert_equal(torch.autograd.grad(found.sum(), w), expected)
