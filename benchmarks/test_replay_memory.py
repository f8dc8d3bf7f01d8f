"""How many bytes do per-op policies hold, and how many operators do they execute again? Counted, not timed.

Four transformer blocks (width 256, batch 4, sequence 512), and one region over 32 layers, beside torch's own functions;
whole models in one region, and with `offload` around them.
Run with `python -m pytest benchmarks/test_replay_memory.py`; prints bytes held after the forward and at the peak, over
plain training, without parameters and their gradients, and the operators that backward executed.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt
from actckpt.memory import LiveStorages

_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm")
_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
_selective = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, _KEPT)
_RECOMPUTE_ALL = actckpt.policies.PerOp({}, default="recompute")  # "recompute" is a rerun for `checkpoint`

Run = Callable[[nn.Module, Tensor], Tensor]

_METHODS: dict[str, Run] = {
    "plain": lambda block, x: block(x),
    "torch checkpoint": lambda block, x: torch_checkpoint.checkpoint(block, x, use_reentrant=False),
    "torch selective": lambda block, x: torch_checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=_selective
    ),
    "actckpt keep": lambda block, x: actckpt.checkpoint(block, x, policy=_KEPT),
    "actckpt rerun": lambda block, x: actckpt.checkpoint(block, x),
    "actckpt recompute": lambda block, x: actckpt.checkpoint(block, x, policy=_RECOMPUTE_ALL),
}


class _Block(nn.Module):
    """A pre-norm block: attention with eight heads, and a feed-forward layer four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return y


class _Count(TorchDispatchMode):
    """Operators executed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.calls[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class _Figures:
    held_bytes: int
    peak_bytes: int
    #: Executed in backward, without views.
    calls: Counter[str]
    gradients: list[Tensor]

    @property
    def num_matmuls(self) -> int:
        return sum(self.calls[name] for name in _MATMULS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    actckpt.configure(observers=[_Count])
    yield
    actckpt.configure(observers=())
    torch.set_num_threads(threads)


def _measure(model: nn.Module, forward: Callable[[], Tensor]) -> _Figures:
    model.zero_grad()
    forward().sum().backward()  # the first call of a region is audited
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveStorages(parameters=model.parameters()) as live:
        loss = forward().square().mean()
        held_bytes = live.live_bytes
        with _Count() as count:
            loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return _Figures(held_bytes, live.peak_bytes, count.calls, gradients)


def _report(results: dict[str, _Figures], benchmark: Any, capsys: pytest.CaptureFixture[str], title: str) -> None:
    """Print the figures and add them to the benchmark's; gradients must be those of plain training."""
    plain = results["plain"]
    figures = {}
    for name, got in results.items():
        assert all(torch.equal(a, b) for a, b in zip(got.gradients, plain.gradients, strict=True)), name
        figures[name] = {
            "held": got.held_bytes / plain.held_bytes,
            "peak": got.peak_bytes / plain.peak_bytes,
            "matmuls_in_backward": got.num_matmuls,
            "operators_in_backward": got.calls.total(),
        }
    benchmark.extra_info.update(plain_held_bytes=plain.held_bytes, plain_peak_bytes=plain.peak_bytes, figures=figures)
    with capsys.disabled():
        print(f"\n{title}: plain holds {plain.held_bytes / 2**20:.1f} MiB, peak {plain.peak_bytes / 2**20:.1f} MiB")
        for name, row in figures.items():
            print(f"  {name:20} " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))


def test_four_transformer_blocks(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(_Block(256) for _ in range(4))), torch.randn(4, 512, 256)

    def forward(run: Run) -> Tensor:
        return functools.reduce(lambda x, block: run(block, x), model, inputs)

    results = {name: _measure(model, functools.partial(forward, run)) for name, run in _METHODS.items()}
    _report(results, benchmark, capsys, "4 transformer blocks, one region each")
    benchmark.pedantic(lambda: forward(_METHODS["actckpt keep"]).sum().backward(), rounds=1, iterations=1)
    plain, kept = results["plain"], results["actckpt keep"]
    assert kept.held_bytes <= 0.64 * plain.held_bytes
    assert kept.peak_bytes <= 0.79 * plain.peak_bytes
    assert kept.num_matmuls == plain.num_matmuls
    for name in ("actckpt rerun", "actckpt recompute"):
        assert results[name].peak_bytes <= results["torch checkpoint"].peak_bytes, name


def test_one_region_over_32_layers(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(32)))
    inputs = torch.randn(256, 512)
    with _Count() as forward:
        model(inputs)
    results = {name: _measure(model, functools.partial(run, model, inputs)) for name, run in _METHODS.items()}
    _report(results, benchmark, capsys, f"32 layers, one region; the forward has {forward.calls.total()} operators")
    benchmark.pedantic(lambda: _METHODS["actckpt recompute"](model, inputs).sum().backward(), rounds=1, iterations=1)
    plain, ours = results["plain"].calls, results["actckpt recompute"]
    for name, number in forward.calls.items():
        assert ours.calls[name] - plain[name] <= 2 * number, name
    assert ours.peak_bytes <= 0.35 * results["plain"].peak_bytes


#: Model, inputs, and what it takes (docs/how-it-works.md): peak over plain's, operators executed again.
_WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[float, int]]] = {
    "32 layers of Linear(512) and GELU, batch 256": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(32))),
        (256, 512),
        (0.21, 115),
    ),
    "12 transformer blocks (width 128, batch 4, sequence 128)": (
        lambda: nn.Sequential(*(_Block(128) for _ in range(12))),
        (4, 128, 128),
        (0.16, 203),
    ),
    "4 transformer blocks (width 256, batch 4, sequence 512)": (
        lambda: nn.Sequential(*(_Block(256) for _ in range(4))),
        (4, 512, 256),
        (0.33, 59),
    ),
}


@pytest.mark.parametrize("name", _WHOLE)
def test_a_whole_model_in_one_region(name: str, benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    make, shape, expected = _WHOLE[name]
    model, inputs = make(), torch.randn(shape)
    step = functools.partial(_METHODS["actckpt recompute"], model, inputs)
    results = {"plain": _measure(model, functools.partial(model, inputs)), "actckpt recompute": _measure(model, step)}
    _report(results, benchmark, capsys, f"{name}, one region")
    benchmark.pedantic(lambda: step().sum().backward(), rounds=1, iterations=1)
    plain, ours = results.values()
    again = ours.calls.total() - plain.calls.total()
    assert (round(ours.peak_bytes / plain.peak_bytes, 2), again) == expected


#: Model, inputs, and the peak over plain's of `offload` around it, which keeps nothing of 1 MiB or more in memory.
_OFFLOADED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "32 layers of Linear(512) and GELU, batch 512": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(32))),
        (512, 512),
        0.18,
    ),
    "12 transformer blocks (width 256, batch 4, sequence 256)": (
        lambda: nn.Sequential(*(_Block(256) for _ in range(12))),
        (4, 256, 256),
        0.19,
    ),
    "4 transformer blocks (width 256, batch 4, sequence 512)": (
        lambda: nn.Sequential(*(_Block(256) for _ in range(4))),
        (4, 512, 256),
        0.42,
    ),
}


@pytest.mark.parametrize("name", _OFFLOADED)
def test_offload_around_a_whole_model(name: str, benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    make, shape, expected = _OFFLOADED[name]
    model, inputs = make(), torch.randn(shape)

    def step() -> Tensor:
        with actckpt.offload():
            loss: Tensor = model(inputs)
        return loss

    results = {"plain": _measure(model, functools.partial(model, inputs)), "actckpt offload": _measure(model, step)}
    _report(results, benchmark, capsys, f"{name}, offload around it")
    benchmark.pedantic(lambda: step().sum().backward(), rounds=1, iterations=1)
    plain, ours = results.values()
    assert round(ours.peak_bytes / plain.peak_bytes, 2) == expected
