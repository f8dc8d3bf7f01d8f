"""A rerun that saves other values than its forward raises, where torch is silently wrong."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracle import CountOperators, assert_equal, leaf, ours, plain, theirs
from torch import Tensor, nn

import actckpt
from actckpt.errors import ActckptWarning, RerunMismatchError
from actckpt.memory import LiveStorages

_NUMBERS = itertools.count(1)


@pytest.fixture(autouse=True)
def _audits_each_call() -> None:
    actckpt.configure(audit="always")  # until the fixture of all tests puts it back


class _Dispatch:
    """A layout that differs in each call although its inputs do not, as of experts' tokens."""

    @staticmethod
    def permuted(x: Tensor) -> Tensor:
        return torch.arange(len(x)).roll(next(_NUMBERS))


@torch.library.custom_op("actckpt_tests::dispatched", mutates_args=())
def _dispatched(x: Tensor) -> Tensor:
    return x[_Dispatch.permuted(x)].clone()


_dispatched.register_autograd(lambda ctx, grad: grad.clone())

#: Functions that differ in each call, by what differs.
IMPURE: dict[str, Callable[[Tensor], Tensor]] = {
    "a counter": lambda x: (x * next(_NUMBERS)).exp(),
    "Python's random numbers": lambda x: (x * random.random()).exp(),
    "NumPy's random numbers": lambda x: (x * float(np.random.rand())).exp(),
    "an operator of one's own": lambda x: _dispatched(x).exp(),
    "indices": lambda x: x[_Dispatch.permuted(x)].exp(),
    "integers": lambda x: x[torch.tensor([next(_NUMBERS) % 3])] * 2,
}


#: `apply` keeps the results of operators (test_unrepeatable_operators.py).
_RAISING = [*itertools.product(IMPURE, ["function", "module", "apply"])]
_RAISING.remove(("an operator of one's own", "apply"))


@pytest.mark.parametrize(("name", "method"), _RAISING)
def test_a_function_that_is_not_pure_raises(name: str, method: str) -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return IMPURE[name](x)

    x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    if method == "apply":
        model = nn.Sequential(Block())
        actckpt.apply(model, blocks=Block)
        y = model(x)
    else:
        y = ours(Block() if method == "module" else IMPURE[name], x)
    with pytest.raises(RerunMismatchError, match=r"does not repeat its forward: saved tensor.* no right gradient"):
        y.sum().backward()


@pytest.mark.parametrize("name", IMPURE)
def test_a_policy_is_right_where_a_rerun_raises(name: str) -> None:
    def run(method: Callable[..., Tensor], **options: Any) -> Tensor | None:
        global _NUMBERS
        _NUMBERS = itertools.count(1)
        random.seed(0)
        np.random.seed(0)
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        method(IMPURE[name], x, **options).sum().backward()
        return x.grad

    assert_equal(run(ours, policy=[torch.ops.actckpt_tests.dispatched.default]), run(plain))


def test_torch_is_silently_wrong() -> None:
    x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    y = theirs(IMPURE["a counter"], x)
    y.sum().backward()
    scale = y.detach().log() / x.detach()
    assert x.grad is not None and not torch.allclose(x.grad, scale * y.detach())


def _audited_calls(function: Callable[..., Tensor], num_calls: int) -> list[int]:
    """Return the calls whose rerun raises, of a function that differs in each run."""
    raised = []
    for call in range(1, num_calls + 1):
        try:
            ours(function, torch.tensor([0.1, 0.2, 0.3], requires_grad=True)).sum().backward()
        except RerunMismatchError:
            raised.append(call)
    return raised


@pytest.mark.parametrize(
    ("audit", "audited"), [("first", [1, 2, 4, 8]), ("always", [*range(1, 11)]), ("off", [])], ids=str
)
@pytest.mark.parametrize("kind", ["function", "module"])
def test_settings_say_which_calls_are_audited(audit: Any, audited: list[int], kind: str) -> None:
    actckpt.configure(audit=audit)  # until the fixture of all tests puts it back
    runs = itertools.count(1)
    impure = lambda x: (x * next(runs)).exp()  # noqa: E731
    module = type("Counts", (nn.Module,), {"forward": lambda _, x: impure(x)})()
    code = f"lambda x: impure(x) * {1 + len(audited)}"  # of its own in each case: calls are counted by code
    function = module if kind == "module" else eval(code, {"impure": impure})
    assert _audited_calls(function, 10) == audited


@pytest.mark.parametrize("audit", ["off", "first", "always"])
def test_modes_of_the_program_see_no_audit(audit: Any) -> None:
    actckpt.configure(audit=audit)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    counts = []
    for method in (plain, ours):
        with CountOperators() as operators, LiveStorages(parameters=model.parameters()) as live:
            method(model, x)
        counts.append((operators.total, live.live_bytes))
    assert counts[0][0] == counts[1][0] and counts[1][1] <= counts[0][1]


def _reads_new_memory(x: Tensor) -> Tensor:
    """Compute on uninitialized rows, like the padding of experts' tokens, and return only the other rows."""
    rows = torch.empty(2 * len(x))
    rows[: len(x)] = x.detach()
    memory = rows.numpy()[len(x) :]
    if (memory != 3).any():  # as if what was there before differed in each run; memory that is filled stays
        memory[:] = next(_NUMBERS) % 5 / 10
    return (rows.exp() * torch.cat([x, x]).exp())[: len(x)]


@torch.library.custom_op("actckpt_tests::with_new_memory", mutates_args=())
def _with_new_memory(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory that it never writes beside its result, as flash attention does with the state of its dropout."""
    memory = torch.empty(4)
    if (memory != 3).any():
        memory[:] = next(_NUMBERS) % 5 / 10
    return x.exp(), memory


_with_new_memory.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*output),
)


@pytest.mark.parametrize(
    "function", [_reads_new_memory, lambda x: _with_new_memory(x)[0]], ids=["function", "operator"]
)
def test_values_from_uninitialized_memory_warn(function: Callable[[Tensor], Tensor]) -> None:
    x, expected = (torch.tensor([0.1, 0.2, 0.3], requires_grad=True) for _ in range(2))
    with pytest.warns(ActckptWarning, match="With uninitialized memory filled, it repeats itself"):
        ours(function, x).sum().backward()
    function(expected).sum().backward()
    assert_equal(x.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:.*With uninitialized memory filled")
def test_uninitialized_memory_excuses_no_other_difference() -> None:
    with pytest.raises(RerunMismatchError):
        ours(lambda x: _reads_new_memory(x) * (x.detach() * next(_NUMBERS)).exp(), leaf(3)).sum().backward()


@pytest.mark.parametrize(
    "other", [lambda x: x.flip(-1), lambda x: x.t() * 1, lambda x: x.t().sin().asin()], ids=["leaf", "view", "strides"]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_runs_that_save_the_input_in_other_ways_raise(other: Callable[[Tensor], Tensor], is_first: bool) -> None:
    runs = itertools.count()
    x, weight = torch.rand(4, 4).requires_grad_(), torch.randn(4, 4)
    with pytest.raises(RerunMismatchError):
        ours(lambda x: ((other(x) if (next(runs) == 0) is is_first else x).sin() * weight).sin(), x).sum().backward()


class Counts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return IMPURE["a counter"](x)


class Equal(Counts):
    """Cannot be hashed."""

    def __eq__(self, other: object) -> bool:
        return True


def _decorated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @functools.wraps(function)
    def call(x: Tensor) -> Tensor:
        return function(x)

    return call


def _one(number: int, x: Tensor) -> Tensor:
    return IMPURE["a counter"](x) if number == 2 else x.exp()


#: Functions of one line of the program each, of which the last one is impure.
OF_ONE_LINE: dict[str, Callable[[], list[Callable[[Tensor], Tensor]]]] = {
    "modules": lambda: [lambda x, m=m: m(x) for m in (nn.Tanh(), nn.Sigmoid(), Counts())],
    "modules that cannot be hashed": lambda: [lambda x, m=m: m(x) for m in (nn.Tanh(), nn.Sigmoid(), Equal())],
    "decorated functions": lambda: [_decorated(f) for f in (torch.exp, torch.sin, IMPURE["a counter"])],
    "steps of a loop": lambda: [lambda x, number=number: _one(number, x) for number in range(3)],
}


@pytest.mark.parametrize("name", OF_ONE_LINE)
def test_each_function_of_one_line_is_audited(name: str) -> None:
    actckpt.configure(audit="first")
    *pure, impure = OF_ONE_LINE[name]()
    for function in pure * 3:
        ours(function, leaf(3)).sum().backward()
    with pytest.raises(RerunMismatchError):
        ours(impure, leaf(3)).sum().backward()


def test_a_function_that_fails_when_it_runs_again_raises_the_same_error() -> None:
    values = iter([1.0, 2.0])
    with pytest.raises(RerunMismatchError, match="has other values"):
        ours(lambda x: (x * next(values)).exp(), leaf(3)).sum().backward()


@pytest.mark.parametrize("num_other", [1, 2, 3, 4, 5])
def test_a_function_that_differs_in_its_first_runs_raises(num_other: int) -> None:
    runs = itertools.count()
    with pytest.raises(RerunMismatchError, match="has other values"):
        ours(lambda x: (x * min(next(runs), num_other)).exp(), leaf(3)).sum().backward()


@pytest.mark.parametrize(
    "options", [{"determinism_check": "none"}, {"use_reentrant": False, "determinism_check": "none"}]
)
def test_without_the_check_of_determinism_nothing_is_compared(options: dict[str, Any]) -> None:
    ours(IMPURE["a counter"], leaf(3), **options).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_difference_like_that_of_rounding_warns_once(dtype: torch.dtype) -> None:
    scale = (1 if dtype is torch.bfloat16 else 4) * torch.finfo(dtype).eps
    block = type(f"Rounds{dtype}", (nn.Module,), {"forward": lambda _, x: (x * (1 + scale * next(_NUMBERS))).sin()})
    x = torch.linspace(0.5, 1.0, 512, dtype=dtype).requires_grad_()
    with pytest.warns(ActckptWarning, match="as small as one of rounding") as warned:
        for _ in range(4):
            ours(block(), x).sum().backward()
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float32, "another order"),
        (torch.bfloat16, "another order"),
        (torch.float32, "one of many"),
        (torch.float32, "zeros"),
        (torch.bfloat16, "zeros"),
    ],
)
def test_rounding_explains_nothing_else(dtype: torch.dtype, change: str) -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = x.detach()
    one, some = (torch.arange(512) % number for number in (500, 9))
    other = {"another order": y.flip(0), "one of many": y * (one > 0), "zeros": y * (some > 0)}[change]
    runs = itertools.count()

    def function(x: Tensor) -> Tensor:
        return (x + (other - y if next(runs) else torch.zeros_like(y))).sin()

    with pytest.raises(RerunMismatchError, match="has other values"):
        ours(function, x).sum().backward()


def _modules() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    yield "batch norm", lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU(inplace=True)), (2, 4, 5)
    yield "rrelu", lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU(), nn.Dropout(0.3)), (2, 4)
    yield "spectral norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)
    yield "lstm", lambda: nn.LSTM(4, 4, 2, dropout=0.2), (5, 2, 4)
    yield "attention", lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2), (5, 2, 4)
    yield "fractional pooling", lambda: nn.FractionalMaxPool2d(2, output_size=2), (2, 3, 5, 5)


@pytest.mark.parametrize(("name", "make", "shape"), [*_modules()])
def test_modules_of_torch_pass(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    module = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            result = ours(module, torch.randn(shape, requires_grad=True))
            (result[0] if isinstance(result, tuple) else result).square().sum().backward()


@pytest.mark.parametrize("retain", [True, False])
def test_nested_checkpoints_and_repeated_backwards_are_audited(retain: bool) -> None:
    calls = itertools.count()

    def inner(x: Tensor) -> Tensor:
        return (x * (1.0 if next(calls) < (3 if retain else 1) else 2.0)).exp()

    x = leaf(3)
    y = ours(lambda x: ours(inner, x).sin(), x) if not retain else ours(inner, x)
    if retain:
        y.sum().backward(retain_graph=True)
        next(calls)
        next(calls)
    with pytest.raises(RerunMismatchError):
        y.sum().backward()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_hooks_that_give_other_bytes_back_are_not_blamed(depth: int) -> None:
    def nested(x: Tensor, depth: int) -> Tensor:
        return ours(nested, x * 1.0, depth - 1).sin() if depth else x.exp().sin()

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.to(torch.float32)):
        y = ours(nested, torch.tensor([0.11, 0.22, 0.33], requires_grad=True), depth)
    y.sum().backward()
