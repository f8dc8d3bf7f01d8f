"""Train a small language model plainly and with activation checkpointing; compare bits, memory and time.

`actckpt demo` runs it. The text is the source of Python's standard library, one token per byte.

Shapes: B batch, S sequence, D width, H query heads, K key and value heads, E width of a head.
"""

import dataclasses
import functools
import hashlib
import json
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import actckpt
from actckpt.memory import measure_step

__all__ = ["BYTE_VALUES", "Block", "LanguageModel", "Options", "run"]

BYTE_VALUES = 256
_MIB = 2**20
_MAX_TRIAL_STEPS = 200


# The model.


class Attention(nn.Module):
    """Causal self-attention with rotary positions; H / K query heads share a key and value head."""

    def __init__(self, dim: int, *, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map x (B, S, D) to (B, S, D); `rotation` (2, S, E / 2) holds cosines and sines."""
        projections = (self.query, self.key, self.value)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in projections)
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = max(8, dim * 8 // 3 // 8 * 8)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D)."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One transformer block: the unit that is checkpointed."""

    def __init__(self, dim: int, *, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads=heads, kv_heads=kv_heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = SwiGLU(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D); `rotation` as in `Attention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class LanguageModel(nn.Module):
    """Predicts the next byte: (B, S) to logits (B, S, 256), for S up to `seq`."""

    rotation: Tensor

    def __init__(self, *, layers: int, dim: int, heads: int, kv_heads: int, seq: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=heads, kv_heads=kv_heads, dropout=dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, BYTE_VALUES, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
        angles = torch.outer(torch.arange(seq), frequencies)
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map byte values (B, S) to logits (B, S, 256)."""
        rotation = self.rotation[:, : tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of values (i, i + E / 2) of x (B, H, S, E) by its position's angle."""
    cos, sin = rotation.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


# The methods.


def _plain(model: LanguageModel) -> None:
    """Keep every activation."""


def _torch_checkpoint(model: LanguageModel) -> None:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _recompute(model: LanguageModel) -> None:
    actckpt.apply(model, blocks=Block)


def _keep_matmuls(model: LanguageModel) -> None:
    actckpt.apply(model, policy="matmuls", blocks=Block)


def _budget(model: LanguageModel, share: str) -> None:
    actckpt.apply(model, blocks=Block, activation_budget=share)


def _methods(budgets: Sequence[str]) -> dict[str, Callable[[LanguageModel], None]]:
    """Return a function for each method that changes a new model; plain training first."""
    methods: dict[str, Callable[[LanguageModel], None]] = {
        "plain": _plain,
        "torch checkpoint": _torch_checkpoint,
        "recompute": _recompute,
        "keep matmuls": _keep_matmuls,
    }
    return methods | {f"budget {share}": functools.partial(_budget, share=share) for share in budgets}


# Training.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `actckpt demo` takes.

    Raises:
        ValueError: a number is out of range, or `dim` is no multiple of `2 * heads`.
    """

    device: torch.device
    steps: int = 20
    layers: int = 8
    dim: int = 128
    heads: int = 4
    seq: int = 256
    batch: int = 4
    dropout: float = 0.1
    seed: int = 0
    #: Shares or sizes, as for `apply(activation_budget=)`.
    activation_budgets: Sequence[str] = ("75%", "50%", "25%")

    def __post_init__(self) -> None:
        for name in ("steps", "layers", "dim", "heads", "seq", "batch"):
            if not 1 <= (value := getattr(self, name)) < 2**31:
                raise ValueError(f"--{name} is {value}, but must be at least 1 and below 2**31.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is {self.dropout}, but must be at least 0 and below 1.")
        if self.dim % (2 * self.heads):
            raise ValueError(f"--dim is {self.dim}, but must be a multiple of {2 * self.heads}, twice --heads.")


class _Training:
    """One model, trained with one method, always on the same batches."""

    def __init__(self, options: Options, text: Tensor, apply: Callable[[LanguageModel], None]) -> None:
        torch.manual_seed(options.seed)
        heads = options.heads
        kv_heads = heads // 2 if heads % 2 == 0 else heads
        sizes: dict[str, Any] = {name: getattr(options, name) for name in ("layers", "dim", "seq", "dropout")}
        self.model = LanguageModel(heads=heads, kv_heads=kv_heads, **sizes).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.device = options.device
        self._batches = _batches(options, text)
        apply(self.model)

    def step(self) -> tuple[float, float]:
        """Run one optimizer step; return its loss and its seconds."""
        tokens = next(self._batches).to(self.device)
        start_s = self._now_s()
        loss = self.forward_backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, self._now_s() - start_s

    def forward_backward(self, tokens: Tensor) -> float:
        """Run forward and backward on (B, S + 1) bytes; return the mean cross-entropy."""
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.device.type != "cpu"):
            logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def finish_trials(self) -> None:
        """Train until `apply` tries no more plans for the budget."""
        for _ in range(_MAX_TRIAL_STEPS):
            if not actckpt.report(self.model).race_steps_left:
                break
            self.step()

    def peak_bytes(self) -> int:
        """Return the peak of activations in one forward and backward."""
        tokens = next(self._batches).to(self.device)
        parameters = list(self.model.parameters())
        return measure_step(lambda: self.forward_backward(tokens), device=self.device, parameters=parameters).peak_bytes

    def digest(self) -> str:
        """Return a SHA-256 of all parameters."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _now_s(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def _batches(options: Options, text: Tensor) -> Iterator[Tensor]:
    """Yield batches of random stretches of the text, int64 (B, S + 1), the same for the same seed."""
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        starts = torch.randint(len(text) - options.seq, (options.batch, 1), generator=generator)
        yield text[starts + torch.arange(options.seq + 1)].long()


def _read_text(length: int) -> Tensor:
    """Return up to 4 MiB of Python source as uint8 (N,), N at least `length`."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 4 * _MIB]
    if len(text) < length:
        raise ValueError(f"--seq is {length - 1}; the text has {len(text)} bytes, at most 4 MiB of {folder}.")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# The comparison.


@dataclasses.dataclass
class _Result:
    losses: list[float]
    digest: str
    peak_bytes: int
    step_seconds: list[float] = dataclasses.field(default_factory=list)

    def bits(self) -> tuple[list[str], str]:
        return [loss.hex() for loss in self.losses], self.digest


def run(options: Options, *, out: Path, prints_json: bool = False, draws: bool = True) -> int:
    """Train with every method, compare, print a table, and write `demo.json` and `demo.png` into the folder `out`.

    Losses and parameters of all methods must equal those of plain training in every bit. Steps are timed in rounds, one
    step of each method per round.

    Returns:
        The exit status: 0 if all methods are equal, else 1.
    Raises:
        OSError: `out` cannot be written.
        ValueError: the text is too short, or a budget is none.
    """
    out.mkdir(parents=True, exist_ok=True)
    if options.device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True, warn_only=True)
    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    results = _train_all(options, _methods(options.activation_budgets), progress)
    different = [name for name, result in results.items() if result.bits() != results["plain"].bits()]
    if different:  # rarely, torch itself is nondeterministic
        again = _train_all(options, {"plain": _plain}, progress)["plain"]
        different = [name for name in different if results[name].bits() != again.bits()]
    content = json.dumps(_as_dict(options, results, different), indent=2)
    (out / "demo.json").write_text(content + "\n")
    if draws:
        _draw(results, out / "demo.png", progress)
    for name in different:
        progress.print(f"FAILED: {name} differs from plain training. Please report it with {out / 'demo.json'}.")
    if prints_json:
        print(content)
    else:
        _print_table(options, results)
        if not different:
            print(f"Losses of {options.steps} steps and all parameters are bit-identical in {len(results)} runs.")
        print(f"Written to {out}.")
    return 1 if different else 0


def _train_all(
    options: Options, methods: dict[str, Callable[[LanguageModel], None]], progress: Console
) -> dict[str, _Result]:
    results: dict[str, _Result] = {}
    text = _read_text(options.seq + 1)
    trainings = {name: _Training(options, text, apply) for name, apply in methods.items()}
    for name, training in trainings.items():
        progress.print(f"{name}: {options.steps} steps")
        torch.manual_seed(options.seed)  # dropout
        losses = [training.step()[0] for _ in range(options.steps)]
        digest = training.digest()
        if name.startswith("budget"):
            training.finish_trials()
        results[name] = _Result(losses, digest, training.peak_bytes())
    progress.print(f"all: {options.steps} steps each, in turns, for their time")
    for _ in range(options.steps):
        for name, training in trainings.items():
            results[name].step_seconds.append(training.step()[1])
    return results


def _as_dict(options: Options, results: dict[str, _Result], different: Sequence[str]) -> dict[str, Any]:
    return {
        "options": {**dataclasses.asdict(options), "device": str(options.device)},
        "versions": {"actckpt": actckpt.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "equal": not different,
        "different": list(different),
        "results": {name: dataclasses.asdict(result) for name, result in results.items()},
    }


def _ratios(results: dict[str, _Result]) -> dict[str, tuple[float, float]]:
    """Return step time and peak of each method over plain training's."""
    plain = results["plain"]
    plain_s = statistics.median(plain.step_seconds)
    return {
        name: (statistics.median(result.step_seconds) / plain_s, result.peak_bytes / plain.peak_bytes)
        for name, result in results.items()
    }


def _print_table(options: Options, results: dict[str, _Result]) -> None:
    title = f"{options.layers} layers, width {options.dim}, batch {options.batch} x {options.seq}, {options.device}"
    table = Table(title=title, title_justify="left", caption="peak: activations; step: median", caption_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in ("peak (MiB)", "/ plain", "step (ms)", "/ plain", "last loss"):
        table.add_column(heading, justify="right", no_wrap=True)
    ratios = _ratios(results)
    for name, result in results.items():
        time_ratio, peak_ratio = ratios[name]
        milliseconds = statistics.median(result.step_seconds) * 1e3
        cells = [f"{result.peak_bytes / _MIB:.1f}", f"{peak_ratio:.2f}", f"{milliseconds:.1f}", f"{time_ratio:.2f}"]
        table.add_row(name, *cells, f"{result.losses[-1]:.6f}")
    console = Console()
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="")  # rich itself would end the program where the reader of a pipe is gone


def _draw(results: dict[str, _Result], path: Path, progress: Console) -> None:
    """Draw two panels of bars: peak and step time over plain training's."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no global state, no display
    except ImportError:
        progress.print("No picture: pip install matplotlib")
        return
    figure = Figure(figsize=(11, 0.5 * len(results) + 1.2), dpi=150, layout="constrained")
    columns = figure.subplots(1, 2, sharey=True)
    for index, (axes, label) in enumerate(zip(columns, ("Step time / plain", "Peak activations / plain"), strict=True)):
        bars = axes.barh(list(results), [ratio[index] for ratio in _ratios(results).values()], color=f"C{index}")
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.set_xlabel(label)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    columns[0].invert_yaxis()
    figure.savefig(path)
