"""Dispatch modes of the program that change what operators return: gradients are plain autograd's all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Checkpoint, CountOperators, assert_equal, in_region, leaf, ours, plain
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import actckpt
from actckpt.memory import LiveStorages
from actckpt.policies import PerOp

_aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore:The dispatch mode .* is active around a region:UserWarning")


class MoreMul(TorchDispatchMode):
    """One more than the product, for every product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + 1 if func is _aten.mul.Tensor else result


class Noise(TorchDispatchMode):
    """Another result for every operator that makes numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_alias = any(returned.alias_info is not None for returned in func._schema.returns)
        makes_numbers = isinstance(result, Tensor) and result.is_floating_point() and not is_alias
        return result * 1.5 if makes_numbers else result


class InPlace(TorchDispatchMode):
    """Changes results, and what it was given, behind the back of whoever called the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _aten.exp.default:
            result.add_(0.5)
        return result


class Replaces(TorchDispatchMode):
    """Runs another operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _aten.cos.default(*args) if func is _aten.sin.default else func(*args, **(kwargs or {}))


class Counter(TorchDispatchMode):
    """Counts, and changes nothing; who would know?"""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class WorseLiveStorages(LiveStorages):
    """Of a known kind, but with a handler of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return result + 1 if func is _aten.mul.Tensor else result


class LessMul(TorchFunctionMode):
    """One less than the product. Function modes are above what is recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result - 1 if func in (torch.mul, Tensor.mul, Tensor.__mul__) else result


MODES: dict[str, Callable[[], Any]] = {
    "more": MoreMul,
    "noise": Noise,
    "in place": InPlace,
    "replaces": Replaces,
    "of a known kind": WorseLiveStorages,
    "function": LessMul,
}
POLICIES: dict[str, Any] = {
    "recompute": "recompute",
    "list": [_aten.sin.default],
    "offload": PerOp({_aten.exp.default: "offload"}, default="recompute"),
    "by value": lambda info: actckpt.Action.RECOMPUTE,
}


def _body(x: Tensor, w: Tensor) -> Tensor:
    h = (x.sin() * w).exp()
    h = (h @ w * w.sin()).tanh()
    buffer = torch.empty_like(h)
    buffer.copy_(h)
    return (h * buffer).exp().sin() * w.t()


class Body(torch.nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(w.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return _body(x, self.w)


def _in_hooks(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with save_on_cpu(), actckpt.region():
        return function(*args)


def _nested(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with actckpt.region(), save_on_cpu(), actckpt.region():
        return function(*args)


def _module(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    module = torch.nn.Module()
    module.forward = function
    return ours(module, *args)


METHODS: dict[str, Checkpoint] = {
    **{name: in_region(policy) for name, policy in POLICIES.items()},
    "in hooks": _in_hooks,
    "nested": _nested,
    "checkpoint of a function": ours,
    "checkpoint of a module": _module,
}


def _stack() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]


def _gradients(run: Checkpoint, forward: Any = None, backward: Any = None, function: Any = _body) -> list[Tensor]:
    """Return result and gradients of two backwards, with modes around the forward and around backward."""
    forward, backward = (mode or contextlib.nullcontext() for mode in (forward, backward))
    torch.manual_seed(5)
    x, w = leaf(3, 3), leaf(3, 3)
    with forward:
        y = run(function, x, w)
    grad = torch.ones(3, 3)
    before = _stack()
    with backward:
        inside = _stack()
        first = torch.autograd.grad(y, (x, w), grad, retain_graph=True)
        second = torch.autograd.grad(y, (x, w), grad)
        assert _stack() == inside
    assert _stack() == before
    return [y.detach(), *first, *second]


@pytest.fixture(params=["first", "off"])
def _audit(request: Any) -> None:
    actckpt.configure(audit=request.param)


@pytest.mark.usefixtures("_audit")
@pytest.mark.parametrize("where", ["forward", "backward", "both, as one", "both", "inside"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a_mode_around_a_part_of_a_step_changes_what_it_changes_in_plain_autograd(
    method: str, mode: str, where: str
) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        if where != "inside":
            return _body(x, w)
        y = _body(x, w)
        with MODES[mode]():
            y = _body(y, w)
        return _body(y, w)

    def with_modes(run: Checkpoint) -> list[Tensor]:
        made = MODES[mode]()
        forward = made if where not in ("backward", "inside") else None
        backward = made if where == "both, as one" else MODES[mode]() if where in ("backward", "both") else None
        return _gradients(run, forward, backward, function)

    run = METHODS[method]
    for _ in range(2):  # until audits are over
        assert_equal(_gradients(run), _gradients(plain))
    for _ in range(2):
        assert_equal(with_modes(run), with_modes(plain))
    assert_equal(_gradients(run), _gradients(plain))


# What is known to change nothing.


def _report(mode: Any) -> actckpt.Report:
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with mode:
        with actckpt.region() as r:
            y = _body(x, w)
        y.sum().backward()
    return r.report()


def _known_modes() -> dict[str, Callable[[], Any]]:
    from torch.testing._internal.logging_tensor import LoggingTensorMode

    found: dict[str, Callable[[], Any]] = {
        "LiveStorages": LiveStorages,
        "FlopCounterMode": lambda: FlopCounterMode(display=False),
        "allow_mutation_on_saved_tensors": torch.autograd.graph.allow_mutation_on_saved_tensors,
        "LoggingTensorMode": LoggingTensorMode,
    }
    with contextlib.suppress(ImportError):
        from torch.utils._debug_mode import DebugMode

        found["DebugMode"] = DebugMode
    if torch.distributed.is_available():
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed.tensor.debug import CommDebugMode

        found |= {"CommDebugMode": CommDebugMode, "MemTracker": MemTracker}
    return found


@pytest.mark.parametrize("name", _known_modes())
def test_modes_known_to_change_nothing_do_not_count(name: str) -> None:
    expected = _report(contextlib.nullcontext())
    found = _report(_known_modes()[name]())
    assert found.recomputed_bytes == expected.recomputed_bytes > 0
    assert found.kept_bytes == expected.kept_bytes or name == "allow_mutation_on_saved_tensors"  # hooks hold the inputs


def test_the_report_names_the_mode_on_account_of_which_values_are_kept() -> None:
    report = _report(Counter())
    assert report.recomputed_bytes == 0
    reasons = {why for row in report.rows for why in row.not_replayed if row.operator != "(input)"}
    name = "test_dispatch_modes.Counter"
    assert reasons == {
        f"made below the dispatch mode {name}, which may change results; if it does not, name it in "
        "configure(observers=...)"
    }


@pytest.mark.filterwarnings("always::UserWarning")
def test_one_warning_per_type_of_mode_says_why_nothing_is_recomputed(recwarn: pytest.WarningsRecorder) -> None:
    class First(Counter):
        """Of a type that no test has run before."""

    class Second(First):
        """Another one."""

    def step(policy: Any, *active: TorchDispatchMode) -> actckpt.ModelReport:
        model = torch.nn.Sequential(Body(torch.eye(512)), Body(torch.eye(512)))  # 1 MiB per value
        actckpt.apply(model, policy=policy, blocks=Body)
        with contextlib.ExitStack() as stack:
            for mode in active:
                stack.enter_context(mode)
            model(torch.randn(512, 512)).sum().backward()
        return actckpt.report(model)

    assert "First" not in step("recompute", First()).note  # a rerun runs below the mode
    assert "First" not in step("keep", First()).note
    assert not recwarn.list
    for _ in range(2):
        found = step("matmuls", First(), Second())
    assert found.recomputed_bytes == 0
    assert "made below the dispatch mode" in found.note and "Second" in found.note
    messages = [str(warning.message) for warning in recwarn.list]
    assert [warning.filename for warning in recwarn.list] == [__file__] * 2
    for message, name in zip(messages, ["First", "Second"], strict=True):
        assert f".{name} is active around a region and may change what operators return" in message
        assert f"configure(observers=[{name}])" in message
    actckpt.configure(observers=[First, Second])
    assert step("matmuls", First(), Second()).recomputed_bytes > 0


def test_configure_observers_lists_modes_that_change_nothing() -> None:
    actckpt.configure(observers=[Counter], audit="off")  # audits run operators, too
    assert _report(Counter()).recomputed_bytes == _report(contextlib.nullcontext()).recomputed_bytes > 0
    counters = [Counter(), Counter()]
    for run, counter in zip((plain, in_region()), counters, strict=True):
        _gradients(run, backward=counter)
    assert counters[0].count < counters[1].count  # it sees replayed operators


def test_one_mode_among_others_that_may_change_results_suffices() -> None:
    with CountOperators(), MoreMul(), LiveStorages():
        expected = _gradients(plain)
        with LiveStorages():
            assert_equal(_gradients(in_region()), expected)


@pytest.mark.parametrize("kind", ["rerun", "replay"])
def test_modes_are_put_back_after_an_error(kind: str) -> None:
    class FailsError(Exception):
        pass

    @torch.library.custom_op("dispatch_modes::fail", mutates_args=())
    def fail(x: Tensor) -> Tensor:
        if fails:
            raise FailsError
        return x.clone()

    fails: list[int] = []
    w, t = torch.randn(3, requires_grad=True), torch.randn(3)
    if kind == "rerun":
        with MoreMul():
            y = actckpt.checkpoint(lambda w: w * fail(t), w)
    else:
        with actckpt.region():
            y = w * fail(t)
    fails.append(1)
    with Replaces() as mode:
        with pytest.raises(FailsError):
            torch.autograd.grad(y, w, torch.ones(3))
        assert _stack() == [mode]
    assert _stack() == []
