r"""What recording one operator costs: CPU time of forward and backward over plain, per operator.

    python benchmarks/recording.py [--against CHECKOUT] [--pairs 30] [--models gpt2 ...] \
        --out benchmarks/results/recording_MACHINE_DATE.json

`apply(policy="matmuls")` on models with random weights, one thread: GPT-2 small (batch 1, sequence 128) and ViT-tiny
(batch 1, 224 x 224). The "thin" ones have the same operators on widths and sequences so small that kernels take little
time, so that differences of a few microseconds show; one has dropout. Beside it torch's selective checkpointing that
saves the same operators, and a dispatch mode and hooks that do nothing: what torch takes to ask anybody.

Methods run in turns. Figures are medians over rounds of CPU time: seconds, and the difference to plain in the same
round per operator that ran in a block. `backward` has what is replayed. With `--against`, another checkout, with its
extension built in place, runs each round too, in a process of its own: its figures are `before`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt

_aten = torch.ops.aten
_MATMULS = [
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default),
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer; `vocabulary` 0: it sees images."""

    width: int
    heads: int
    tokens: int
    vocabulary: int = 0
    dropout: float = 0.0
    layers: int = 12


_GPT2 = Shape(768, 12, 128, 50257)
_GPT2_THIN = Shape(24, 12, 8, 64)
SHAPES: dict[str, Shape] = {
    "gpt2": _GPT2,
    "vit-tiny": Shape(192, 3, 196),
    "gpt2 thin": _GPT2_THIN,
    "gpt2 thin with dropout": Shape(24, 12, 8, 64, dropout=0.1),
    "vit-tiny thin": Shape(12, 3, 4),
}


class Block(nn.Module):
    """A block of GPT-2, whose activation is spelled out as in Transformers, or of a ViT."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.is_causal, self.dropout = shape.heads, shape.vocabulary > 0, shape.dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).split(width, dim=2)
        query, key, value = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self._dropped(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self._dropped(self.down(self._active(self.up(self.norms[1](x)))))

    def _active(self, x: Tensor) -> Tensor:
        if not self.is_causal:
            return functional.gelu(x)
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.dropout else x


class Transformer(nn.Module):
    """GPT-2 or ViT."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        if shape.vocabulary:
            self.embedding: nn.Module = nn.Embedding(shape.vocabulary, shape.width)
        else:
            self.embedding = nn.Conv2d(3, shape.width, 16, stride=16)
        self.positions = nn.Parameter(torch.randn(1, shape.tokens, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary or 1000, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map tokens or an image to a loss."""
        hidden = self.embedding(inputs)
        if not self.shape.vocabulary:
            hidden = hidden.flatten(2).transpose(1, 2)
        hidden = hidden + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        loss: Tensor = self.head(self.norm(hidden)).float().square().mean()
        return loss

    def inputs(self) -> Tensor:
        """Return tokens or an image."""
        tokens = self.shape.tokens
        if self.shape.vocabulary:
            return torch.randint(0, self.shape.vocabulary, (1, tokens))
        side = 16 * int(tokens**0.5)
        return torch.randn(1, 3, side, side)


class _Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


def _wrap_blocks(model: Transformer, wrapped: Callable[[Any, Tensor], Tensor]) -> None:
    for block in model.blocks:
        block.forward = functools.partial(wrapped, block.forward)  # type: ignore[method-assign, assignment]


def _mode_and_hooks(function: Any, hidden: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), _Idle():
        result: Tensor = function(hidden)
    return result


_selective = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, _MATMULS)


def _torch_selective(function: Any, hidden: Tensor) -> Any:
    return torch_checkpoint.checkpoint(function, hidden, use_reentrant=False, context_fn=_selective)


METHODS: dict[str, Callable[[Transformer], object]] = {
    "plain": lambda model: None,
    "mode and hooks": lambda model: _wrap_blocks(model, _mode_and_hooks),
    "actckpt": lambda model: actckpt.apply(model, policy="matmuls", blocks=Block),
    "torch selective": lambda model: _wrap_blocks(model, _torch_selective),
}


def num_operators(model: Transformer, inputs: Tensor) -> int:
    """Return how many operators run in the blocks of a forward."""
    counting = _Counting()

    def counted(function: Any, hidden: Tensor) -> Any:
        with counting:
            return function(hidden)

    shared = with_shared_parameters(model)
    _wrap_blocks(shared, counted)
    shared(inputs)
    return counting.num_operators


def with_shared_parameters(model: Transformer) -> Transformer:
    """Return a copy on the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def steps_of(shape: Shape) -> tuple[dict[str, Callable[[], tuple[float, float]]], int]:
    """Return a step by each method, which says the CPU seconds of its forward and backward, and the operators in it."""
    torch.manual_seed(0)
    model = Transformer(shape)
    inputs = model.inputs()
    steps = {}
    for name, prepare in METHODS.items():
        prepared = with_shared_parameters(model)
        prepare(prepared)
        steps[name] = functools.partial(_step, prepared, inputs)
    return steps, num_operators(model, inputs)


def _step(model: Transformer, inputs: Tensor) -> tuple[float, float]:
    start = time.process_time()
    loss = model(inputs)
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    for parameter in model.parameters():
        parameter.grad = None
    return middle - start, end - middle


def _summary(samples: dict[str, list[tuple[float, float]]], num: int, phase: int) -> dict[str, dict[str, float]]:
    seconds = {name: [pair[phase] for pair in pairs] for name, pairs in samples.items()}
    found = {}
    for name, values in seconds.items():
        over = sorted((value - plain) / num for value, plain in zip(values, seconds["plain"], strict=True))
        found[name] = {
            "seconds": round(statistics.median(values), 7),
            "us_per_operator": round(1e6 * statistics.median(over), 3),
            "quartiles_us": [round(1e6 * over[len(over) * part // 4], 3) for part in (1, 3)],
        }
    return found


def measure(name: str, rounds: int, warm_ups: int, workers: dict[str, Worker]) -> dict[str, Any]:
    """Return the figures of a model in each of the workers."""
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {each: {} for each in workers}
    nums = {each: worker.ask(f"{warm_ups} {name}") for each, worker in workers.items()}
    for _ in range(rounds):
        for each in random.sample(list(workers), len(workers)):
            for method, pair in workers[each].ask("").items():
                samples[each].setdefault(method, []).append(pair)
    return {
        each: {
            "operators": nums[each],
            "pairs": rounds,
            "forward": _summary(samples[each], nums[each], 0),
            "backward": _summary(samples[each], nums[each], 1),
        }
        for each in workers
    }


class Worker:
    """A process that runs rounds of all methods with the actckpt of a checkout."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        found = self.ask("where")
        assert found == str(checkout / "actckpt"), found

    def ask(self, line: str) -> Any:
        """Return the answer to a line: what `_work` says."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def _work() -> None:
    """Answer lines: "where", "WARM_UPS MODEL" with the number of its operators, an empty one with a round."""
    steps: dict[str, Callable[[], tuple[float, float]]] = {}
    for line in sys.stdin:
        answer: Any
        if line.strip() == "where":
            answer = str(Path(actckpt.__file__).parent)
        elif line.strip():
            warm_ups, _, name = line.strip().partition(" ")
            steps, answer = steps_of(SHAPES[name])
            for _ in range(int(warm_ups)):
                for step in steps.values():
                    step()
        else:
            answer = {name: steps[name]() for name in random.sample(list(steps), len(steps))}
            answer = {name: answer[name] for name in steps}
        print(json.dumps(answer), flush=True)


def _print(name: str, which: str, found: dict[str, Any]) -> None:
    print(f"{name}, {which}: {found['operators']} operators in blocks, {found['pairs']} rounds", flush=True)
    for phase in ("forward", "backward"):
        for method, row in found[phase].items():
            low, high = row["quartiles_us"]
            print(
                f"  {phase:8}  {method:16} {1e3 * row['seconds']:9.3f} ms  over plain, per operator "
                f"{row['us_per_operator']:7.2f} us [{low:.2f}, {high:.2f}]"
            )


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="MODEL")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--pairs", type=int, default=30, help="rounds, ten times as many where models are thin")
    parser.add_argument("--warm-ups", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.worker:
        _work()
        return 0
    workers = {"before": Worker(args.against.resolve())} if args.against is not None else {}
    workers["now"] = Worker(Path(__file__).resolve().parents[1])
    figures = {}
    for name in args.models:
        figures[name] = measure(name, args.pairs * (10 if "thin" in name else 1), args.warm_ups, workers)
        for which, found in figures[name].items():
            _print(name, which, found)
    for worker in workers.values():
        worker.end()
    if args.out is not None:
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        content = {"machine": {**machine, "torch": torch.__version__}, "figures": figures}
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
