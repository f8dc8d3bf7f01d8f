"""What does `checkpoint` cost where operators are small? Time of forward and backward over plain.

32 x [Linear(16) + GELU], batch 4, one thread, in 32, 8 and 1 regions, beside torch's own function. Run with
`python -m pytest benchmarks/test_rerun_overhead.py`; prints every median and its ratio to plain.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.autograd.graph import saved_tensors_hooks

import actckpt

_LAYERS = 32
_STEPS = 5  # per sample
_SAMPLES = 40

Run = Callable[[Any, torch.Tensor], torch.Tensor]


class _Stop(BaseException):
    pass


def _bare_rerun(function: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Hooks and a rerun in Python, with no check, no random state, no other backward: a yardstick."""
    values: list[Any] = []
    num_saved = 0

    def pack(tensor: torch.Tensor) -> int:
        nonlocal num_saved
        num_saved += 1
        return num_saved - 1

    def pack_again(tensor: torch.Tensor) -> torch.Tensor:
        values.append(tensor.detach())
        if len(values) == num_saved:
            raise _Stop
        return tensor

    def unpack(index: int) -> Any:
        if not values:
            again = hidden.detach().requires_grad_()
            try:
                with torch.enable_grad(), saved_tensors_hooks(pack_again, lambda value: value):
                    function(again)
            except _Stop:
                pass
        value, values[index] = values[index], None
        return value

    with saved_tensors_hooks(pack, unpack):
        result: torch.Tensor = function(hidden)
    return result


_METHODS: dict[str, Run] = {
    "plain": lambda segment, hidden: segment(hidden),
    "torch": lambda segment, hidden: torch_checkpoint.checkpoint(segment, hidden, use_reentrant=False),
    "bare rerun": _bare_rerun,
    "actckpt": actckpt.checkpoint,
    "actckpt, no random state": lambda segment, hidden: actckpt.checkpoint(segment, hidden, preserve_rng_state=False),
    "actckpt, no early stop": lambda segment, hidden: actckpt.checkpoint(segment, hidden, early_stop=False),
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
    benchmark.extra_info.update(num_regions=num_regions, medians_us=medians_us, ratios=ratios)
    benchmark.pedantic(steps["actckpt"], rounds=20, iterations=1)
    with capsys.disabled():
        parts = [f"{name} {medians_us[name]:.0f} us ({ratios[name]:.2f} x)" for name in medians_us]
        print(f"\n{num_regions} regions: {', '.join(parts)}")
    assert ratios["actckpt"] < ratios["torch"]
