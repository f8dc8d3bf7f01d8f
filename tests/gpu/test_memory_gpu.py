"""What the CUDA allocator says of a step: no more than torch's checkpoint needs, under each allocator."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_oracle import run_in_process
from gpu_programs import DEVICE, OURS, THEIRS, Block, Method, peak_bytes, stack
from oracle import plain

import actckpt

_MIB = 1 << 20
#: Which of torch's methods needs no less.
_LIKE = {
    "rerun": "rerun",
    "rerun, inputs away": "rerun",
    "replay": "rerun",
    "replay, inputs away": "rerun",
    "list": "list",
    "contexts": "list",
    "per operator": "list",
}
#: What the allocator rounds up, and blocks that it does not split.
_SLACK = 4 * _MIB


def _step_bytes(call: Method, model: torch.nn.Module) -> tuple[int, int]:
    """Return the bytes after the forward and at the peak of the third step, above those before it."""
    x = torch.randn(8, 512, 512, device=DEVICE)
    held = 0

    def step() -> None:
        nonlocal held
        h = x
        for block in model:
            h = call(block, h)
        loss = h.square().mean()
        del h
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        loss.backward()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    return peak_bytes(step) - before, held - before


@pytest.mark.parametrize("method", _LIKE)
def test_a_step_peaks_no_higher_than_with_torchs_checkpoint(method: str) -> None:
    model = stack(8, 512)  # an activation of 8 MiB; plainly a block saves some 150 MiB
    of_plain = _step_bytes(plain, model)
    of_theirs = _step_bytes(THEIRS[_LIKE[method]], model)
    of_ours = _step_bytes(OURS[method], model)
    found = f"(peak, held): plain {of_plain}, torch {of_theirs}, actckpt {of_ours}"
    print(found)
    assert of_ours[0] <= of_theirs[0] + _SLACK and of_ours[0] < of_plain[0], found
    if "away" not in method and method != "per operator":  # copies out may still be under way
        assert of_ours[1] <= of_theirs[1] + _SLACK, found


@pytest.mark.parametrize("policy", ["recompute", [], "matmuls", "attention", "offload"], ids=str)
def test_applied_to_a_model_a_policy_lowers_the_peak(policy: Any) -> None:
    def peak(is_ours: bool) -> int:
        model = stack(8, 512)
        if is_ours:
            actckpt.apply(model, policy, blocks=Block)
        return _step_bytes(plain, model)[0]

    of_plain, of_ours = peak(False), peak(True)
    assert of_ours < 0.9 * of_plain, f"plain {of_plain}, actckpt {of_ours}"


def test_nothing_is_left_after_many_steps() -> None:
    model = stack(2, 256)
    x = torch.randn(4, 256, 256, device=DEVICE)

    def steps(count: int) -> int:
        for _ in range(count):
            for call in OURS.values():
                call(model, x).square().mean().backward()
        torch.cuda.synchronize()
        with actckpt.offload(min_bytes=0):  # any call lets go of what has ended
            y = x.sin()
        del y
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = steps(3)
    assert steps(10) <= first + _MIB


_ALLOCATORS = {
    "expandable segments": "expandable_segments:True",
    "asynchronous": "backend:cudaMallocAsync",
    "collecting": "garbage_collection_threshold:0.2,max_split_size_mb:21",
}


@pytest.mark.parametrize("allocator", _ALLOCATORS)
def test_gradients_under_other_allocators(allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of other files once more, in a process whose allocator is another one."""
    here = Path(__file__).parent
    files = [
        f"{here / 'test_checkpoint_gpu.py'}::test_gradients_of_each_policy",
        f"{here / 'test_checkpoint_gpu.py'}::test_a_block_that_works_on_two_streams",
        f"{here / 'test_offload_gpu.py'}::test_memory_is_used_again_while_copies_are_in_flight",
        f"{here / 'test_offload_gpu.py'}::test_several_streams_save_and_read_the_same_tensors",
    ]
    chosen = "(fp32 and deterministic) or two_streams or in_flight or several_streams"
    options = [word for plugin in ("xdist", "cacheprovider", "benchmark") for word in ("-p", f"no:{plugin}")]
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    settings = {"PYTORCH_CUDA_ALLOC_CONF": _ALLOCATORS[allocator]}
    run_in_process("-m", "pytest", "-q", *options, "-k", chosen, *files, timeout_s=180, **settings)


def test_a_snapshot_of_the_allocator_has_labels() -> None:
    model, x = stack(3), torch.randn(2, 64, 128, device=DEVICE)
    actckpt.apply(model)
    model(x).sum().backward()
    torch.cuda.memory._record_memory_history()
    try:
        with actckpt.label_memory():
            model(x).sum().backward()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    labels = {event.get("user_metadata") or "" for events in snapshot["device_traces"] for event in events}
    assert any(label.startswith("actckpt: aten.") for label in labels), labels
    assert any(label.startswith("actckpt: again aten.") for label in labels), labels
