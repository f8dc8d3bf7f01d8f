"""Random programs of operators and nested regions, and what running one gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, seed, settings, strategies as st
from input_routes import ROUTES
from on_device import random_states
from oracle import Checkpoint

SIZE = 4
Tensors = list[torch.Tensor]
#: An operator takes the pool of tensors and two indices into it.
Operator = Callable[[Tensors, int, int], torch.Tensor]


def _in_place(change: Callable[[torch.Tensor], Any]) -> Operator:
    """Change a clone that only this operator knows, so that no saved tensor becomes invalid."""

    def operator(pool: Tensors, a: int, b: int) -> torch.Tensor:
        result = pool[a] + 0.5 * pool[b]
        change(result)
        return result

    return operator


class _SavesAll(torch.autograd.Function):
    """Saves its inputs and one of its two results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * x * w
        ctx.save_for_backward(x, w, y)
        return y, y.sum()

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor, grad_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w, y = ctx.saved_tensors
        grad = grad_y + grad_sum
        return grad * 2 * x * w + 0 * y, grad * x * x


def _custom_function(pool: Tensors, a: int, b: int) -> torch.Tensor:
    y, total = _SavesAll.apply(pool[a].sin(), pool[b])
    return (y * total).tanh()


OPERATORS: dict[str, Operator] = {
    "sin": lambda pool, a, _: pool[a].sin(),
    "tanh of matmul": lambda pool, a, b: (pool[a] @ pool[b]).tanh(),
    "multiply": lambda pool, a, b: pool[a].sigmoid() * pool[b],
    "transpose": lambda pool, a, _: pool[a].t(),
    "flip a view": lambda pool, a, _: pool[a][1:].flip(0).reshape(-1)[: SIZE * SIZE - SIZE].repeat(2)[:16].view(4, 4),
    "strided view": lambda pool, a, _: pool[a].contiguous().as_strided((SIZE, SIZE), (1, 1)).tanh(),
    "join halves": lambda pool, a, b: torch.cat([pool[a][:2], pool[b][2:]]),
    "sort": lambda pool, a, _: pool[a].sort(dim=0).values,
    "dropout": lambda pool, a, _: torch.nn.functional.dropout(pool[a], 0.4),
    "noise": lambda pool, a, _: pool[a] * torch.rand(SIZE, SIZE),
    "where": lambda pool, a, b: torch.where(pool[a] > 0, pool[a], pool[b].cos()),
    "softmax": lambda pool, a, _: pool[a].softmax(dim=-1),
    "normalise": lambda pool, a, _: torch.nn.functional.layer_norm(pool[a], (SIZE,)),
    "detach": lambda pool, a, b: pool[a].detach() * pool[b],
    "relu in place": _in_place(torch.relu_),
    "multiply rows in place": _in_place(lambda x: x[::2].mul_(3)),
    "copy a column in place": _in_place(lambda x: x[:, 0].copy_(x[:, 1].clone())),
    "dropout in place": _in_place(lambda x: torch.nn.functional.dropout(x, 0.3, inplace=True)),
    "fill in place": _in_place(lambda x: x.diagonal().fill_(0.5)),
    "custom function": _custom_function,
}

indices = st.integers(0, 7)
operators = st.tuples(st.sampled_from(sorted(OPERATORS)), indices, indices)
#: How a region gets its tensors but the first one. Inner regions would set the same globals before backward; a class
#: refers to itself, and with it what its methods hold until the collector runs.
PASSINGS = [name for name in ROUTES if not name.startswith("global") and name != "method of a class"]
bodies = st.recursive(
    st.lists(operators, min_size=1, max_size=4),
    lambda inner: st.lists(
        operators | st.tuples(st.just("region"), st.sampled_from(PASSINGS), inner), min_size=1, max_size=4
    ),
    max_leaves=4,
)
regions = st.lists(st.tuples(st.just("region"), st.sampled_from(PASSINGS), bodies), min_size=1, max_size=2)


def _run(body: list[Any], pool: Tensors, checkpoint: Checkpoint) -> Tensors:
    """Run a body on a pool of tensors; returns what it made."""
    made = []
    for kind, first, second in body:
        known = [*pool, *made]
        if kind == "region":
            made += _region(first, second, known[-3:], checkpoint)
        else:
            made.append(OPERATORS[kind](known, first % len(known), second % len(known)))
    return made[-2:]


def _region(passing: str, body: list[Any], pool: Tensors, checkpoint: Checkpoint) -> Tensors:
    def read(first: torch.Tensor, held: Tensors) -> Tensors:
        return _run(body, [first, *held], checkpoint)

    return ROUTES[passing](checkpoint, read, pool[0], pool[1:])


BACKWARDS = ("once", "several times", "of its gradients", "by parts")


class Drawn(NamedTuple):
    """A program, and how it is run."""

    program: list[Any]
    #: Of its three inputs.
    with_grad: list[bool]
    #: Of its first outputs, those that the loss is made of.
    used: list[bool]
    #: One of `BACKWARDS`.
    backward: str
    seed: int


draws = st.builds(
    Drawn,
    program=regions,
    with_grad=st.lists(st.booleans(), min_size=3, max_size=3).map(lambda flags: flags if any(flags) else [True] * 3),
    used=st.lists(st.booleans(), min_size=2, max_size=2),
    backward=st.sampled_from(BACKWARDS),
    seed=st.integers(0, 3),
)
#: That each test draws, and from which seed; `pytest --programs` and `--seed` say it.
num_programs = 300
seed_of_run = 0


def many_draws(test: Any) -> Any:
    """Let a test draw so many programs, the same ones for the same seed."""
    ignored = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    drawn = settings(max_examples=num_programs, suppress_health_check=ignored, deadline=None, database=None)
    return seed(seed_of_run)(drawn(test))


def seeds() -> range:
    """Return seeds of graphs for a test, a tenth of the number of programs."""
    first = 1000 * seed_of_run
    return range(first, first + num_programs // 10)


class ByDepth:
    """Calls regions in several ways, by how many are open; a rerun begins at the depth of its region."""

    def __init__(self, ways: Sequence[Checkpoint]) -> None:
        self._ways = ways
        self._depth = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = self._depth + 1

        def at_own_depth(*args: Any, **kwargs: Any) -> Any:
            outer, self._depth = self._depth, own
            try:
                return function(*args, **kwargs)
            finally:
                self._depth = outer

        return self._ways[own % len(self._ways)](at_own_depth, *args, **kwargs)


def outcome(checkpoint: Checkpoint, drawn: Drawn) -> Any:
    """Run a program; returns its values, its gradients, and random states."""
    torch.manual_seed(drawn.seed)
    inputs = [torch.randn(SIZE, SIZE).requires_grad_(needed) for needed in drawn.with_grad]
    pool = [inputs[0], *(x * 1.5 for x in inputs[1:])]
    outputs = _run(drawn.program, pool, checkpoint)
    values = [output.detach().clone() for output in outputs]
    after_forward = random_states()
    chosen = [o for o, is_used in zip(outputs, drawn.used, strict=False) if is_used and o.requires_grad] or [
        o for o in outputs if o.requires_grad
    ]
    del outputs
    grads = list(_backwards(chosen, [x for x in inputs if x.requires_grad], drawn.backward)) if chosen else []
    return values, grads, after_forward, random_states()


def _backwards(outputs: Tensors, wanted: Tensors, kind: str) -> Iterator[Any]:
    """Yield the gradients of each backward over the outputs."""
    losses = [output.square().sum() for output in outputs]
    outputs.clear()
    loss = sum(losses[1:], losses[0])
    if kind == "by parts":  # parts of the graph die one after the other
        del loss
        while losses:
            yield torch.autograd.grad(losses.pop(), wanted, retain_graph=bool(losses), allow_unused=True)
        return
    if kind == "several times":
        yield torch.autograd.grad(loss, wanted[-1:], retain_graph=True, allow_unused=True)
        yield torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    found = torch.autograd.grad(loss, wanted, create_graph=kind == "of its gradients", allow_unused=True)
    yield [gradient.detach() for gradient in found if gradient is not None]
    second = [gradient.square().sum() for gradient in found if gradient is not None and gradient.requires_grad]
    if second:
        yield torch.autograd.grad(sum(second[1:], second[0]), wanted, allow_unused=True)
