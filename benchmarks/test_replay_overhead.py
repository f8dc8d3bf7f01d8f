"""What does a per-op policy cost where operators are small? Time of forward and backward over plain.

32 x [Linear(16) + GELU], batch 4, one thread, in 32, 8 and 1 regions that keep addmm and recompute the rest, beside
torch's selective checkpointing. Run with `python -m pytest benchmarks/test_replay_overhead.py`; prints every median and
its ratio to plain. "mode and hooks" is a dispatch mode and saved-tensor hooks that do nothing: a yardstick. The table
of places says the same as the list of operators; the ratio of the two is the median over pairs of samples.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt

_LAYERS = 32
_STEPS = 5  # per sample
_SAMPLES = 40
_KEPT = [torch.ops.aten.addmm.default]

Run = Callable[[Any, torch.Tensor], torch.Tensor]


class _Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def _mode_and_hooks(function: Any, hidden: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), _Idle():
        result: torch.Tensor = function(hidden)
    return result


_selective = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, _KEPT)


def _torch_selective(function: Any, hidden: torch.Tensor) -> Any:
    return torch_checkpoint.checkpoint(function, hidden, use_reentrant=False, context_fn=_selective)


def _region(policy: Any) -> Run:
    def run(function: Any, hidden: torch.Tensor) -> torch.Tensor:
        with actckpt.region(policy):
            result: torch.Tensor = function(hidden)
        return result

    return run


_METHODS: dict[str, Run] = {
    "plain": lambda segment, hidden: segment(hidden),
    "torch selective": _torch_selective,
    "mode and hooks": _mode_and_hooks,
    "actckpt": _region(_KEPT),
    "actckpt, table of places": _region({"**::aten.addmm": "keep"}),
    "actckpt, torch's contexts": lambda segment, hidden: actckpt.checkpoint(segment, hidden, context_fn=_selective),
    "actckpt, recompute all": _region("recompute"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _step_function(run: Run, num_regions: int) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(_LAYERS)]
    size = _LAYERS // num_regions
    segments = [torch.nn.Sequential(*layers[i : i + size]) for i in range(0, _LAYERS, size)]
    inputs = torch.randn(4, 16, requires_grad=True)

    def step() -> None:
        hidden = inputs
        for segment in segments:
            hidden = run(segment, hidden)
        hidden.sum().backward()

    return step


@pytest.mark.parametrize("num_regions", [32, 8, 1])
def test_time_over_plain(num_regions: int, benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {name: _step_function(run, num_regions) for name, run in _METHODS.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(20):
            step()
    for _ in range(_SAMPLES):  # interleaved: the machine's speed drifts
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(_STEPS):
                step()
            samples[name].append((time.perf_counter() - start) / _STEPS)
    medians_us = {name: statistics.median(values) * 1e6 for name, values in samples.items()}
    ratios = {name: value / medians_us["plain"] for name, value in medians_us.items()}
    pairs = zip(samples["actckpt, table of places"], samples["actckpt"], strict=True)
    table_over_list = statistics.median(table / listed for table, listed in pairs)
    benchmark.extra_info.update(
        num_regions=num_regions, medians_us=medians_us, ratios=ratios, table_over_list=table_over_list
    )
    benchmark.pedantic(steps["actckpt"], rounds=20, iterations=1)
    with capsys.disabled():
        parts = [f"{name} {medians_us[name]:.0f} us ({ratios[name]:.2f} x)" for name in medians_us]
        print(f"\n{num_regions} regions: {', '.join(parts)}; table over list of operators {table_over_list:.3f}")
    assert ratios["actckpt"] < ratios["torch selective"]
