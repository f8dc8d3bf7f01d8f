"""Checkpoints and regions of every policy kind on a GPU: gradients and random state of plain training, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's name
from gpu_programs import DEVICE, FEW, OURS, Method, assert_as_plain, leaf, repeated, stack
from oracle import assert_equal, in_threads, mlp, plain
from torch import Tensor, nn

import actckpt

_each = pytest.mark.parametrize("method", OURS)
_few = pytest.mark.parametrize("method", FEW)


def _backward(loss: Tensor, model: nn.Module, *leaves: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, [*leaves, *model.parameters()], allow_unused=True))


def _trained(model: nn.Module, call: Method, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Return the gradients of a step over the blocks of a model, each by `call`."""
    x = leaf(4, 256, 128)
    with torch.autocast(DEVICE, dtype) if dtype is not None else nullcontext():
        h = x * 1.5
        for block in model:
            h = call(block, h)
        loss = h.float().square().mean()
    return _backward(loss, model, x)


@pytest.mark.parametrize("is_deterministic", [True, False], ids=["deterministic", "as it comes"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@_each
def test_gradients_of_each_policy(method: str, dtype: torch.dtype | None, is_deterministic: bool) -> None:
    torch.use_deterministic_algorithms(is_deterministic, warn_only=True)
    model = stack()
    assert_as_plain(lambda call: _trained(model, call, dtype), OURS[method])


@_each
def test_forward_never_waits_for_the_device(method: str) -> None:
    """Nor does backward where nothing is moved."""
    model, call = stack(), OURS[method]
    x = leaf(4, 256, 128)

    def forward() -> Tensor:
        h = x * 1.5
        for block in model:
            h = call(block, h)
        return h.square().mean()

    ones = torch.ones((), device=DEVICE)
    for _ in range(3):  # the first step is audited
        forward().backward(ones)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = forward()
        if "away" not in method and "offload" not in method and method not in ("per operator", "places"):
            loss.backward(ones)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


# Random numbers


@contextmanager
def _shared_state() -> Iterator[None]:
    """Let the default generator have the state object of another one, as trackers with graph-safe states do."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(torch.Generator(DEVICE).manual_seed(3).graphsafe_get_state())
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


@_few
def test_a_graph_safe_state_of_the_default_generator(method: str) -> None:
    model = stack(attention_dropout=0.1)
    with _shared_state():
        assert_as_plain(lambda call: _trained(model, call), OURS[method])


@_few
def test_generators_among_the_inputs(method: str) -> None:
    generator = torch.Generator(DEVICE)

    def block(x: Tensor, drawn: torch.Generator) -> Tensor:
        mask = torch.rand(x.shape, device=DEVICE, generator=drawn) > 0.1
        noise = torch.empty_like(x).normal_(generator=drawn)
        return (x.sin() * mask + noise * x).exp() * torch.rand_like(x)

    def program(call: Method) -> Any:
        generator.manual_seed(11)
        x = leaf(512, 512)
        h = call(block, call(block, x * 0.1, generator), generator)
        return torch.autograd.grad(h.sum(), x), generator.get_state()

    assert_as_plain(program, OURS[method])


class _Tracker:
    """A tracker with graph-safe states, as in Megatron: swaps state objects, and copies no bytes."""

    def __init__(self) -> None:
        self._states = {"model": self._default().clone_state()}
        self._states["model"].manual_seed(5)

    @staticmethod
    def _default() -> torch.Generator:
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def get_states(self) -> dict[str, torch.Generator]:
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Generator]) -> None:
        self._states = states

    @contextmanager
    def fork(self) -> Iterator[None]:
        before = self._default().graphsafe_get_state()
        self._default().graphsafe_set_state(self._states["model"])
        try:
            yield
        finally:
            self._states["model"] = self._default().graphsafe_get_state()
            self._default().graphsafe_set_state(before)


@pytest.mark.parametrize("method", ["rerun", "rerun, inputs away"])
def test_a_tracker_with_graph_safe_states(method: str) -> None:
    def program(call: Method) -> Any:
        tracker = _Tracker()

        def block(x: Tensor) -> Tensor:
            with tracker.fork():
                h = F.dropout(x, 0.3)
            return F.dropout(h.sin(), 0.3).exp()

        options = {} if call is plain else {"rng_trackers": [lambda: tracker]}
        x = leaf(512, 512)
        h = call(block, call(block, x, **options), **options)
        return torch.autograd.grad(h.sum(), x), [state.get_state() for state in tracker.get_states().values()]

    assert_as_plain(program, OURS[method])


# Streams and threads


class _TwoStreams(nn.Module):
    """Computes one half on a side stream, behind a long kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.side = nn.Linear(256, 256), nn.Linear(256, 256), torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        current = torch.cuda.current_stream()
        h = x.sin()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(2_000_000)
            right = F.dropout(self.right(h).exp().tanh(), 0.1)
        h.record_stream(self.side)
        left = self.left(h).exp().tanh()
        current.wait_stream(self.side)
        right.record_stream(current)
        return left * right


@_few
def test_a_block_that_works_on_two_streams(method: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(_TwoStreams(), _TwoStreams()).to(DEVICE)

    def program(call: Method) -> Any:
        x = leaf(1024, 256)
        h = x * 0.1
        for block in model:
            h = call(block, h)
        return _backward(h.sum(), model, x)

    assert_as_plain(program, OURS[method])


@_few
def test_backward_on_another_stream_than_forward(method: str) -> None:
    model = stack()

    def program(call: Method) -> Any:
        x = leaf(4, 256, 128)
        torch.cuda._sleep(20_000_000)
        loss = call(model, x * 1.5).square().mean()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            grads = _backward(loss, model, x)
        torch.cuda.current_stream().wait_stream(side)
        return grads

    assert_as_plain(program, OURS[method])


@_few
def test_backwards_of_several_threads(method: str) -> None:
    """Forwards one after the other, since they draw from one generator; backwards at once, each on its own stream."""
    models = [stack(seed=seed) for seed in range(4)]

    def program(call: Method) -> Any:
        leaves = [leaf(4, 256, 128) for _ in models]
        losses = [call(model, x * 1.5).square().mean() for model, x in zip(models, leaves, strict=True)]
        torch.cuda.synchronize()

        def backward(number: int) -> Any:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = _backward(losses[number], models[number], leaves[number])
                torch.cuda.current_stream().synchronize()
            return found

        return in_threads(backward, len(models))

    assert_as_plain(program, OURS[method])


# Settings of libraries


@pytest.mark.parametrize("is_benchmarking", [True, False], ids=["benchmark", "heuristics"])
@_few
def test_convolutions_with_channels_last(method: str, is_benchmarking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", is_benchmarking)
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(3))
    ).to(DEVICE, memory_format=torch.channels_last)
    kept = {name: value.clone() for name, value in model.state_dict().items()}

    def program(call: Method) -> Any:
        model.load_state_dict(kept)
        x = torch.randn(8, 32, 56, 56, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
        h = x * 1.5
        for block in model:
            h = call(block, h)
        assert h.is_contiguous(memory_format=torch.channels_last)
        return _backward(h.square().mean(), model, x), [buffer.clone() for buffer in model.buffers()]

    program(plain)  # cuDNN times its algorithms
    assert_as_plain(program, OURS[method])


@_few
def test_tf32_of_the_forward_is_that_of_its_recomputation(method: str) -> None:
    """Backward's own products are float32; the fixture of all tests puts the setting back."""
    model = mlp(256, 3).to(DEVICE)

    def program(call: Method) -> Any:
        x = leaf(1024, 256)
        torch.backends.cuda.matmul.allow_tf32 = True
        loss = call(model, x * 1.5).square().sum()
        torch.backends.cuda.matmul.allow_tf32 = False
        return _backward(loss, model, x)

    assert_as_plain(program, OURS[method])


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("policy", ["recompute", [], "matmuls", "offload"], ids=str)
@pytest.mark.parametrize("is_scaled", [False, True], ids=["fp32", "fp16 with a scaler"])
def test_steps_of_optimizers(options: dict[str, bool], policy: Any, is_scaled: bool) -> None:
    def steps(is_ours: bool) -> list[Tensor]:
        model = stack()
        if is_ours:
            actckpt.apply(model, policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        scaler = torch.amp.GradScaler(DEVICE, enabled=is_scaled, init_scale=2.0**20)  # the first steps overflow
        torch.manual_seed(3)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16, enabled=is_scaled):
                loss = model(torch.randn(4, 256, 128, device=DEVICE)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach() for parameter in model.parameters())]

    expected = repeated(lambda: steps(False))
    assert_equal(steps(True), expected)
