"""The audit of reruns: a function that does not repeat its forward raises, on the first call that shows it.

Torch's checkpoint computes wrong gradients with each of these functions, and says nothing.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import CountOperators, assert_equal, leaf, ours, plain
from torch.nn import functional as F  # noqa: N812 - torch's own name

import actckpt

CALLS = 0


class Holder:
    def __init__(self) -> None:
        self.value = 1.0
        self.items: list[float] = [1.0]


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Recurrent(torch.nn.Module):
    """Keeps a plain attribute from one call to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = (self.state * 0.5 + x.detach()).detach()
        return (x * self.state).exp()


class Noisy(torch.nn.Module):
    """Has a generator where no rerun looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rand(3, generator=self.generators[0])).exp()


def _counts_in_global(x: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return (x * CALLS).exp()


def _impure(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that reads what it changes."""
    numbers = itertools.count(1)
    identity = torch.nn.Identity()  # tells the call sites of these functions apart
    held: Any = {
        "list": [1.0],
        "dict": {},
        "set": set(),
        "deque": collections.deque([1.0]),
        "attribute": Holder(),
        "slot": Slotted(),
    }.get(name)

    def function(x: torch.Tensor) -> torch.Tensor:
        scale: Any = next(numbers)
        if name == "list":
            held.append(1.0)
            scale = sum(held)
        elif name == "dict":
            scale = held.setdefault("cached", 0.5) + len(held)
            held[scale] = scale
        elif name == "set":
            held.add(scale)
            scale = len(held)
        elif name == "deque":
            held.append(2.0)
            scale = sum(held)
        elif name in ("attribute", "slot"):
            held.value += 1.0
            scale = held.value
        return identity(x * scale).exp()

    return function


IMPURE: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    **{
        name: lambda name=name: _impure(name)
        for name in ("list", "dict", "set", "deque", "attribute", "slot", "iterator")
    },
    "global": lambda: _counts_in_global,
    "attribute of a module": Recurrent,
    "generator in an object of a module": Noisy,
}


@pytest.mark.parametrize("name", IMPURE)
def test_a_function_that_does_not_repeat_its_forward_raises_on_its_first_call(name: str) -> None:
    with pytest.raises(
        actckpt.errors.RerunMismatchError, match=r"(?s)does not repeat its forward: saved tensor 0.*policy"
    ):
        ours(IMPURE[name](), leaf(3)).sum().backward()


@pytest.mark.parametrize("name", IMPURE)
def test_a_policy_is_right_where_a_rerun_raises(name: str) -> None:
    def run(**options: Any) -> list[torch.Tensor]:
        global CALLS
        CALLS = 0
        function, x = IMPURE[name](), torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        for _ in range(2):
            y = ours(function, x, **options) if options else function(x)
            y.sum().backward()
        return [x.grad]

    assert_equal(run(policy="matmuls"), run())


GLOBAL = 1.0


def _reads_global(x: torch.Tensor) -> torch.Tensor:
    return (x * GLOBAL).exp()


def _bind_global(value: float) -> None:
    global GLOBAL
    GLOBAL = value


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [2.0], lambda c: c[0], lambda c: c.append(c.pop() + 1)),
    "dict": (lambda: {"a": 2.0}, lambda c: c["a"], lambda c: c.update(a=3.0)),
    "set": (lambda: {2.0}, len, lambda c: c.add(3.0)),
    "deque": (lambda: collections.deque([2.0]), lambda c: c[0], lambda c: c.appendleft(3.0)),
    "attribute": (Holder, lambda c: c.value, lambda c: setattr(c, "value", 3.0)),
    "slot": (Slotted, lambda c: c.value, lambda c: setattr(c, "value", 3.0)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_somebody_else_changes_between_forward_and_backward_raises(name: str) -> None:
    make, read, change = CHANGED[name]
    held, identity = make(), torch.nn.Identity()
    y = ours(lambda x: identity(x * read(held)).exp(), leaf(3))
    change(held)
    with pytest.raises(actckpt.errors.RerunMismatchError, match="does not repeat its forward"):
        y.sum().backward()


def test_a_global_that_is_bound_anew_between_forward_and_backward_raises() -> None:
    _bind_global(2.0)
    y = ours(_reads_global, leaf(3))
    _bind_global(3.0)
    with pytest.raises(actckpt.errors.RerunMismatchError, match="does not repeat its forward"):
        y.sum().backward()


def test_the_error_names_function_module_line_shape_and_operator() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Recurrent())
    with pytest.raises(actckpt.errors.RerunMismatchError) as raised:
        ours(model, torch.randn(3, requires_grad=True)).sum().backward()
    words = str(raised.value)
    for word in (
        "Sequential",
        "shape (3,), torch.float32",
        "saved in 1, ",
        "x * self.state",
        "Backward0",
        'audit="off"',
    ):
        assert word in words, words


def test_a_function_that_only_counts_its_calls_is_right_and_runs_twice() -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().sin()

    results = []
    for method in (plain, ours):
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        method(function, x).sum().backward()
        results.append(x.grad)
    assert_equal(*results)
    assert len(calls) == 3


def _times_audited(calls: int) -> list[int]:
    """Return which calls of one site leave checksums."""
    numbers, model = [], torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    least = None
    for number in range(1, calls + 1):
        x = torch.randn(number, 3, requires_grad=True)  # another shape each time
        with CountOperators() as operators:
            ours(model, x)
        least = operators.total if least is None else min(least, operators.total)
        numbers.append(operators.total)
    return [number for number, total in enumerate(numbers, start=1) if total > least]


def test_calls_1_2_4_8_of_a_site_are_audited_whatever_the_shapes() -> None:
    assert _times_audited(20) == [1, 2, 4, 8, 16]


def test_configure_audits_each_call_or_none() -> None:
    actckpt.configure(audit="off")
    assert _times_audited(3) == []
    ours(_impure("list"), leaf(3)).sum().backward()  # silently wrong, as with torch
    actckpt.configure(audit="always")
    calls = itertools.count(1)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * (next(calls) if is_impure else 1)).exp()

    is_impure = False
    for _ in range(4):
        ours(function, leaf(3)).sum().backward()
    is_impure = True
    with pytest.raises(actckpt.errors.RerunMismatchError):
        ours(function, leaf(3)).sum().backward()


def test_without_the_check_of_determinism_nothing_is_compared() -> None:
    ours(_impure("list"), leaf(3), determinism_check="none").sum().backward()


def test_a_difference_by_rounding_warns_once() -> None:
    calls = itertools.count()

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * (1 + 1e-7 * next(calls))).exp().sin()

    with pytest.warns(UserWarning, match=r"by rounding.*not deterministic") as warned:
        ours(function, torch.ones(64, requires_grad=True)).sum().backward()
    assert len([one for one in warned if "by rounding" in str(one.message)]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", ["order", "one of many", "dropped"])
def test_rounding_explains_no_other_order_and_no_other_elements(change: str, dtype: torch.dtype) -> None:
    actckpt.configure(audit="always")  # until the fixture of all tests puts it back
    calls = itertools.count()

    def function(x: torch.Tensor) -> torch.Tensor:
        is_rerun = next(calls) > 0
        if change == "order":
            return (x.flip(0) if is_rerun else x * 1).sin()
        if change == "one of many":
            return (x + torch.nn.functional.one_hot(torch.tensor(3 + is_rerun), len(x)).to(dtype) * 9).sin()
        return F.dropout(x, 0.1).sin()

    x = torch.linspace(-1, 1, 256, dtype=dtype).requires_grad_()
    options = {"preserve_rng_state": False} if change == "dropped" else {}
    with pytest.raises(actckpt.errors.RerunMismatchError):
        ours(function, x, **options).sum().backward()


_fills = itertools.cycle([3e7, -5e-3, 7e2, 11.0])


def _leave_other_bytes() -> None:
    """Let new memory of small tensors hold other bytes than before."""
    number = next(_fills)
    for _ in range(3):
        freed = [torch.full((size,), number) for size in range(1, 200)]
        del freed


def _empty_in_part(x: torch.Tensor) -> torch.Tensor:
    padded = torch.empty(8, 3)
    padded[:4] = x
    return (padded * padded.sin())[:4]


def _lstm(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.nn.LSTM(3, 3)(x)[0]


NOT_WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padding": _empty_in_part,
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([0, 2, 1]), x, torch.tensor([0, 2]), mode="sum").sin(),
    "embedding_bag mean": lambda x: F.embedding_bag(torch.tensor([0, 2, 1]), x, torch.tensor([0, 2])).sin(),
    "embedding_bag max": lambda x: F.embedding_bag(torch.tensor([0, 2]), x, torch.tensor([0]), mode="max").sin(),
    "ctc_loss": lambda x: F.ctc_loss(
        x.log_softmax(-1).unsqueeze(1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([1])
    ),
    "lstm": _lstm,
    "rrelu": lambda x: F.rrelu(x.sin(), training=True),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 1, 4, 3),) * 3),
    "batch_norm in evaluation": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)).sin(),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(-1), torch.tensor([0, 1, 2, 0]), reduction="none"),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool1d(x[None], 2).sin(),
    "group_norm": lambda x: F.group_norm(x[None].transpose(1, 2), 3).sin(),
    "strided": lambda x: (x.as_strided((2, 2), (3, 1)) * 2).sin(),
}


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_bytes_that_nobody_wrote_are_no_difference(name: str) -> None:
    function = NOT_WRITTEN[name]

    def run(checkpoint: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        x = torch.randn(4, 3, requires_grad=True)

        def called(x: torch.Tensor) -> torch.Tensor:
            _leave_other_bytes()
            return function(x)

        y = checkpoint(called, x)
        y.sum().backward()
        return [y, x.grad]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(ours)
    assert_equal(found, run(plain))


def test_hooks_that_round_the_inputs_are_no_difference() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).sin().exp()

    x = torch.randn(64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
        y = ours(function, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y.sum().backward()


def test_a_second_backward_and_part_of_a_graph_are_compared_too() -> None:
    function = _impure("list")
    y = ours(function, leaf(3))
    for _ in range(2):
        with pytest.raises(actckpt.errors.RerunMismatchError):
            y.sum().backward(retain_graph=True)


def test_an_audited_region_holds_nothing_but_checksums() -> None:
    model, x = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]), torch.randn(256, 256)
    held = []
    for audit in ("always", "off"):
        actckpt.configure(audit=audit)
        with actckpt.memory.LiveStorages() as live:
            before = live.live_bytes
            y = ours(model, x.requires_grad_())
            held.append(live.live_bytes - before - y.nbytes)
            del y
    assert held[0] - held[1] <= 64 * 16, "two sums and a checksum of 16 saved tensors"
