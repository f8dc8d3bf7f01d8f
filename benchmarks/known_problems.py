"""Known problems of activation checkpointing elsewhere: one small program per public issue of PyTorch.

    PYTHONPATH=. python benchmarks/known_problems.py [--out RESULT.json]

Prints the table of docs/known-problems.md. Programs are written from the descriptions of the issues. Each runs with
torch's function and with actckpt's, and is compared bit for bit with the program without checkpointing.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

import actckpt
from actckpt.memory import LiveStorages

AS_PLAIN = "as plain training"
#: Checkpoints a function of tensors.
Method = Callable[..., Tensor]
#: What a program leaves behind, by name.
Found = dict[str, Tensor | None]
_MIB = 2**20


def _plain(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def rrelu(method: Method) -> Found:
    """RReLU in training: its noise is saved before it is drawn."""
    x = torch.randn(4096, requires_grad=True)
    y = method(lambda x: functional.rrelu(x, 0.1, 0.9, training=True), x)
    others = [torch.full_like(x, 7.0) for _ in range(64)]  # use the memory that the forward freed
    del others
    y.sum().backward()
    return {"gradient of the input": x.grad}


def in_place_after_norm(method: Method) -> Found:
    """The function returns what ReLU changed in place, after InstanceNorm."""
    x = torch.randn(3, 2, 4, requires_grad=True)
    y = method(nn.Sequential(nn.InstanceNorm1d(2), nn.ReLU(inplace=True)), x)
    (y * torch.arange(4.0)).sum().backward()
    return {"gradient of the input": x.grad}


def changed_view(method: Method) -> Found:
    """The function returns a view that ReLU changed in place."""
    weight, x = torch.ones((), requires_grad=True), torch.zeros(5, requires_grad=True)
    method(lambda x: (x + weight)[:].relu_(), x).sum().backward()
    return {"gradient of the parameter": weight.grad}


def input_without_gradient(method: Method) -> Found:
    """`checkpoint_sequential` with an input that requires no gradient."""
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1))
    method(model, torch.randn(1, 10)).sum().backward()
    return {"gradient of the first layer": model[0].weight.grad}


def changed_after_saving(method: Method) -> Found:
    """SELU changes the result of a matrix product in place, which the policy saves."""
    a, b = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    method(lambda a, b: torch.selu_(torch.matmul(a, b)), a, b).sigmoid().sum().backward()
    return {"gradient of the input": a.grad}


def two_backwards(method: Method) -> Found:
    """Two backwards through linear layers, with a policy."""
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
    loss = method(model, torch.randn(1, 10)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return {"gradient of the first layer": model[0].weight.grad}


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return grad * ctx.saved_tensors[0]


def saved_tensors_read_twice(method: Method) -> Found:
    """The backward of a custom function reads `ctx.saved_tensors` twice."""
    x = torch.randn(3, requires_grad=True)
    method(lambda x: _ReadsTwice.apply(x.sin()), x).sum().backward()
    return {"gradient of the input": x.grad}


def running_statistics(method: Method) -> Found:
    """BatchNorm in training counts batches and averages over them."""
    model = nn.Sequential(nn.BatchNorm1d(10), nn.Linear(10, 1))
    method(model, torch.randn(4, 10, requires_grad=True)).sum().backward()
    norm = model[0]
    return {"number of batches": norm.num_batches_tracked, "running mean": norm.running_mean}


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(x + self.weight).exp().sin(), 0.5)


class _Droppings(nn.Module):
    """Returns the result of each block, so that its mask can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Dropping() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks])


def _mask_of_dropout(apply: Callable[[nn.Module], Any]) -> str:
    """Return whether gradients are zero where the forward dropped values, and nowhere else."""
    model = _Droppings()
    called = apply(model)
    for _ in range(3):
        model.zero_grad()
        results = called(torch.zeros(64, 64))
        results.sum().backward()
    if (plan := actckpt.report(model).plan if called is model else None) is not None:
        assert any(plan.rerun), "a budget that recomputes no dropout shows nothing"
    gradients = torch.stack([block.weight.grad for block in model.blocks])
    return "the forward's mask" if torch.equal(gradients == 0, results == 0) else "another mask than the forward's"


class _Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _peak_mib(called: Callable[[Tensor], Tensor]) -> float:
    """Return the peak of what a step allocates, from the events of torch's profiler, after four other steps."""
    x = torch.randn(4, 128, 64)
    for _ in range(4):
        called(x).square().mean().backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        called(x).square().mean().backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return round(peak_bytes / _MIB, 1)


def _blocks() -> nn.Module:
    return nn.Sequential(*(_Block() for _ in range(8)))


def _compiled(model: nn.Module, budget: float) -> Any:
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")

    def call(x: Tensor) -> Tensor:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            result: Tensor = compiled(x)
        return result

    return call


def _with_budget(model: nn.Module, budget: str) -> nn.Module:
    actckpt.apply(model, activation_budget=budget, race=False)
    return model


def _policy(saved: Any) -> Callable[..., CheckpointPolicy]:
    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator == saved else CheckpointPolicy.MUST_RECOMPUTE

    return policy


def _selective(saved: Any) -> dict[str, Method]:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy(saved))
    return {
        "torch's selective checkpoint": functools.partial(checkpoint, use_reentrant=False, context_fn=contexts),
        "actckpt": functools.partial(actckpt.checkpoint, context_fn=contexts),
    }


_BOTH = {
    "`use_reentrant=True`": functools.partial(checkpoint, use_reentrant=True),
    "`use_reentrant=False`": functools.partial(checkpoint, use_reentrant=False),
    "actckpt": actckpt.checkpoint,
}


class Problem(NamedTuple):
    """A program and the methods that it runs with."""

    program: Callable[[Method], Found]
    methods: Mapping[str, Method]


_aten = torch.ops.aten
#: By number of the issue.
PROBLEMS = {
    193671: Problem(rrelu, _BOTH),
    26546: Problem(in_place_after_norm, _BOTH),
    36383: Problem(changed_view, _BOTH),
    42812: Problem(
        input_without_gradient,
        {
            "`use_reentrant=True`": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=True),
            "`use_reentrant=False`": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
            "actckpt": lambda model, x: actckpt.checkpoint_sequential(model, 2, x),
        },
    ),
    119590: Problem(changed_after_saving, _selective(_aten.mm.default)),
    142862: Problem(two_backwards, _selective(_aten.addmm.default)),
    82156: Problem(saved_tensors_read_twice, _BOTH),
    62471: Problem(running_statistics, _BOTH),
}
#: Of the memory of activations, for the issues about budgets. Their programs are compiled with torch's budgets only.
_SHARES = (0.3, 0.5, 0.7)


def outcome(problem: Problem, method: str, seed: int) -> str:
    """Run a program with a method, and describe how what it leaves differs from plain training."""
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            found = problem.program(problem.methods[method])
    except RuntimeError as error:
        text = str(error).removeprefix("torch.utils.checkpoint: ").partition(".")[0].strip()
        return f"raises `{type(error).__name__}`: {text}"
    torch.manual_seed(seed)
    expected = problem.program(_plain)
    missing = [name for name, value in found.items() if value is None]
    other = [name for name, value in found.items() if value is not None and not _is_equal(value, expected[name])]
    said = [f"no {name}" for name in missing] + [f"other {name}" for name in other]
    return ", ".join(said) or AS_PLAIN


def _is_equal(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(value, other)


def masks_of_dropout() -> dict[str, str]:
    """Return whose mask of dropout gradients use, with everything kept and with half of it."""
    found = {}
    for budget in (1.0, 0.5):
        torch._dynamo.reset()
        compiled = functools.partial(_compiled, budget=budget)
        found[f"`torch.compile`, `activation_memory_budget={budget}`"] = _mask_of_dropout(compiled)
    return {**found, "actckpt": _mask_of_dropout(lambda model: _with_budget(model, "50%"))}


def peaks_of_torch() -> list[float]:
    """Return peaks in MiB for shares of the memory of activations, the smallest first."""
    peaks = []
    for share in _SHARES:
        torch._dynamo.reset()
        peaks.append(_peak_mib(_compiled(_blocks(), share)))
    return peaks


def our_peaks_and_budgets() -> tuple[list[float], list[float]]:
    """Return the same with budgets of actckpt, and the budgets."""
    peaks, budgets = [], []
    for share in _SHARES:
        model = _with_budget(_blocks(), f"{100 * share:.0f}%")
        peaks.append(_peak_mib(model))
        plan = actckpt.report(model).plan
        assert plan is not None
        budgets.append(round(plan.budget_bytes / _MIB, 1))
    return peaks, budgets


#: Layers whose products a policy keeps, by what the table says; None: no checkpoint.
KEPT: dict[str, tuple[int, ...] | None] = {
    "no checkpoint": None,
    "the first and the last": (0, 2),
    "the last": (2,),
    "the first": (0,),
    "none": (),
}
_WIDTH = 512


def _keeping(layers: tuple[int, ...]) -> Any:
    """Return contexts of a policy that saves the matrix products of some layers, which it counts."""
    calls = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator != _aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        calls[context.is_recompute] += 1
        is_kept = calls[context.is_recompute] - 1 in layers
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def matmuls_and_bytes(kept: tuple[int, ...] | None, method: Method) -> tuple[float, float]:
    """Return the products of a backward, in products of square matrices, and the MiB that its forward holds."""
    x, first, second = (torch.randn(_WIDTH, _WIDTH, requires_grad=True) for _ in range(3))
    given = x, first, second, torch.randn(_WIDTH, 2 * _WIDTH, requires_grad=True)

    def layers(x: Tensor, first: Tensor, second: Tensor, last: Tensor) -> Tensor:
        return (x @ first @ second @ last).sum()

    expected = torch.autograd.grad(layers(*given), given)
    options = {"context_fn": functools.partial(_keeping, kept)} if kept else {}
    with LiveStorages() as live:
        loss = layers(*given) if kept is None else method(layers, *given, **options)
    held_bytes = live.live_bytes - loss.nbytes
    with FlopCounterMode(display=False) as counter:
        gradients = torch.autograd.grad(loss, given)
    assert all(map(torch.equal, gradients, expected))
    return counter.get_total_flops() / (2 * _WIDTH**3), round(held_bytes / _MIB, 2)


def _without_early_stop(*args: Any, **kwargs: Any) -> Tensor:
    with set_checkpoint_early_stop(False):
        result: Tensor = checkpoint(*args, use_reentrant=False, **kwargs)
    return result


#: By head of the table.
MATMUL_METHODS: dict[str, Method] = {
    "torch, `early_stop=False`": _without_early_stop,
    "torch": functools.partial(checkpoint, use_reentrant=False),
    "actckpt": actckpt.checkpoint,
}


def measure_matmuls() -> dict[str, dict[str, tuple[float, float]]]:
    """Return products and MiB of each method, by what is kept."""
    return {
        name: {method: matmuls_and_bytes(kept, call) for method, call in MATMUL_METHODS.items()}
        for name, kept in KEPT.items()
    }


def matmul_table(figures: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """Return the rows of the table of products and bytes of the page."""
    rows = [[f"{products:.0f}, {mib:.0f} MiB" for products, mib in row.values()] for row in figures.values()]
    return "".join(f"| {name} | {' | '.join(row)} |\n" for name, row in zip(figures, rows, strict=True))


def measure() -> dict[str, dict[str, Any]]:
    """Run everything; returns what each method did, by issue."""
    found: dict[str, dict[str, Any]] = {}
    for number, problem in PROBLEMS.items():
        # Another seed for each: memory that was freed must not hold the right values by chance.
        found[str(number)] = {
            method: outcome(problem, method, 100 + seed) for seed, method in enumerate(problem.methods)
        }
    found["190758"] = dict(masks_of_dropout())
    ours, budgets = our_peaks_and_budgets()
    found["197838"] = {"torch": peaks_of_torch(), "actckpt": ours, "budgets of actckpt": budgets}
    return found


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rows of the table of the page."""
    return "".join(f"| {' | '.join(_row(number, row))} |\n" for number, row in figures.items())


def _row(number: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    link = f"[{number}](https://github.com/pytorch/pytorch/issues/{number})"
    if number == "197838":
        shares = ", ".join(f"{100 * share:.0f} %" for share in _SHARES)
        what = f"Peaks in MiB, with {shares} of the memory of activations"
        ours = f"{_joined(row['actckpt'])}; budgets {_joined(row['budgets of actckpt'])}"
        return link, what, f"`torch.compile`, `activation_memory_budget`: {_joined(row['torch'])}", ours
    if number == "190758":
        what = "Mask of dropout that gradients use, with 50 % of the memory of activations"
    else:
        what = (PROBLEMS[int(number)].program.__doc__ or "").rstrip(".")
    torchs = {name: said for name, said in row.items() if name != "actckpt"}
    if len(torchs) > 1 and len(set(torchs.values())) == 1:
        torchs = {"both variants": next(iter(torchs.values()))}
    return link, what, "; ".join(f"{name}: {said}" for name, said in torchs.items()), row["actckpt"]


def _joined(numbers: list[float]) -> str:
    return ", ".join(f"{number:.1f}" for number in numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="file for the result")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    found = measure()
    matmuls = measure_matmuls()
    print(f"{table(found)}\n{matmul_table(matmuls)}", end="")
    if out is not None:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        head = {"command": "python benchmarks/known_problems.py", "date": str(datetime.date.today())}
        out.write_text(
            json.dumps({**head, "versions": versions, "figures": found, "matmuls": matmuls}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
