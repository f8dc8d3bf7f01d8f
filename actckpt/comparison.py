"""`compare`: time, held bytes and peak of one training step under several policies, measured side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from actckpt._core.training_state import TrainingState
from actckpt._text.sizes import format_bytes
from actckpt._text.tables import aligned
from actckpt.blocks import Blocks, applied_blocks, apply, remove
from actckpt.errors import BlocksError
from actckpt.memory import LiveStorages

__all__ = ["ComparedPolicy", "Comparison", "compare"]

#: Their results cost most to make again.
_EXPENSIVE = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    "_scaled_dot_product_cudnn_attention",
)
PLAIN = "none"


@dataclasses.dataclass(frozen=True)
class ComparedPolicy:
    """What one policy took.

    Attributes:
        name: as given to `compare`.
        seconds: of one step, the median over all rounds.
        ratio: to the step without actckpt of the same round, the median over all rounds.
        lowest_ratio, highest_ratio: of these rounds.
        held_bytes: alive when the forward of the model returns, beyond what was before the step.
        peak_bytes: alive at the worst moment of the step, beyond what was before it, without gradients of parameters.
        same_bits: gradients, parameters and buffers after the step are those of the step without actckpt.
        blocks: to how many blocks the policy was applied.
    """

    name: str
    seconds: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    held_bytes: int
    peak_bytes: int
    same_bits: bool
    blocks: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` measured, the step without actckpt first. `print` shows a table."""

    rows: tuple[ComparedPolicy, ...]
    rounds: int

    def __getitem__(self, name: str) -> ComparedPolicy:
        """Return the row of a policy.

        Raises:
            KeyError: it was not compared.
        """
        return {row.name: row for row in self.rows}[name]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """Return a table, one line per policy."""
        plain = self.rows[0]
        lines = [("policy", "step", "x none (lowest - highest)", "held", "peak", "of none", "bits")]
        for row in self.rows:
            ratio = f"{row.ratio:.2f} ({row.lowest_ratio:.2f} - {row.highest_ratio:.2f})"
            share = f"{100 * row.peak_bytes / max(plain.peak_bytes, 1):.0f} %"
            bits = "equal" if row.same_bits else "DIFFER"
            step = f"{1e3 * row.seconds:.1f} ms"
            lines.append(
                (row.name, step, ratio, format_bytes(row.held_bytes), format_bytes(row.peak_bytes), share, bits)
            )
        return (
            f"{aligned(lines, left=1)}\nMedians of {self.rounds} rounds; bytes beyond what was there before the step."
        )

    def __str__(self) -> str:
        return self.table()

    def plot(self, path: str | Path) -> None:
        """Draw time against memory, as a PNG or SVG file.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        from actckpt._show.plot import plot_points

        points = {row.name: (row.peak_bytes, row.ratio, row.lowest_ratio, row.highest_ratio) for row in self.rows}
        plot_points(points, path=Path(path))


def compare(
    step: Callable[[], object],
    *,
    model: torch.nn.Module,
    policies: Mapping[str, Any] | None = None,
    blocks: Blocks | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    rounds: int = 5,
) -> Comparison:
    """Run a training step under several policies and compare time, held bytes and peak.

    Every policy gives the same gradients; the comparison checks it bit for bit. Policies take turns within each round,
    so that a busy machine hurts all alike. Model, gradients, optimizer and random state are as before afterwards, also
    when the step raises.

    Args:
        step: runs forward and backward, without arguments; may run the optimizer.
        model: what the step trains; nothing of it is checkpointed.
        policies: by name, each as in `apply`, or a dict of keywords of `apply`, `"policy"` among them; `"none"`, the
            step without actckpt, is always compared. None: `recompute` and `keep matmuls` (and convolutions and
            attention), on a GPU also `offload`.
        blocks: as in `apply`.
        optimizer: the one that the step runs, if it does.
        rounds: how often each policy is timed.
    Returns:
        A row per policy.
    Raises:
        ValueError: the step changes parameters and `optimizer` is not given; it leaves no gradients; `rounds` is less
            than 1.
        BlocksError: the model has no such blocks, or some are checkpointed already.
    Cost: `rounds + 2` steps per policy, and a copy of the training state in host memory.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> x = torch.randn(2, 4)
        >>> found = actckpt.compare(lambda: model(x).sum().backward(), model=model, policies={"rerun": "recompute"})
        >>> [row.name for row in found.rows], all(row.same_bits for row in found.rows)
        (['none', 'rerun'], True)
    """
    if rounds < 1:
        raise ValueError(f"compare: rounds={rounds}. Time each policy at least once.")
    if applied := list(applied_blocks(model)):
        raise BlocksError(
            f"compare: {len(applied)} blocks are checkpointed already, the first is {applied[0]!r}. Call "
            "actckpt.remove(model) first: compare applies each policy itself."
        )
    given = _default_policies(model) if policies is None else dict(policies)
    state = TrainingState(model, optimizer)
    try:
        candidates = [_Candidate(PLAIN, model, None)]
        for name, policy in given.items():
            if name != PLAIN:
                candidates.append(_Candidate(name, model, _options(policy, blocks)))
        expected = None
        for candidate in candidates:
            found = candidate.first_step(step, state, may_change=optimizer is not None)
            expected = expected or found
            candidate.same_bits = found == expected
            candidate.measure_memory(step, state)
        for _ in range(rounds):
            for candidate in candidates:
                candidate.time(step, state)
    finally:
        state.put_back()
    plain = candidates[0].seconds
    return Comparison(tuple(candidate.row(plain) for candidate in candidates), rounds)


def _default_policies(model: torch.nn.Module) -> dict[str, Any]:
    expensive = [getattr(torch.ops.aten, name) for name in _EXPENSIVE if hasattr(torch.ops.aten, name)]
    policies: dict[str, Any] = {"recompute": "recompute", "keep matmuls": expensive}
    if _device_of(model).type == "cuda":
        policies["offload"] = "offload"
    return policies


def _options(policy: Any, blocks: Blocks | None) -> dict[str, Any]:
    """Return keywords of `apply`. A dict without a policy in it is one: a table of places."""
    options = dict(policy) if isinstance(policy, Mapping) and "policy" in policy else {"policy": policy}
    return {"blocks": blocks, **options}


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class _Candidate:
    """One policy of a comparison: the forwards that it gives to blocks, and what was measured."""

    def __init__(self, name: str, model: torch.nn.Module, options: dict[str, Any] | None) -> None:
        self._name = name
        self._model = model
        self._device = _device_of(model)
        self._forwards: dict[torch.nn.Module, Any] = {}
        if options is not None:
            apply(model, **options)
            self._forwards = {block: block.forward for block in applied_blocks(model).values()}
            remove(model)
        self.seconds: list[float] = []
        self.same_bits = True
        self._held_bytes = self._peak_bytes = 0

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        for block, forward in self._forwards.items():
            block.forward = forward
        try:
            yield
        finally:
            if self._forwards:
                remove(self._model)

    def first_step(self, step: Callable[[], object], state: TrainingState, *, may_change: bool) -> list[Any]:
        """Warm up; return a digest of what the step leaves."""
        state.put_back()
        with self._applied():
            step()
        changed = None if may_change else state.changed_parameter()
        if changed is not None:
            raise ValueError(
                f"compare: the step changed {changed!r}, so that a second step would not be the same. Pass the "
                "optimizer that it runs (optimizer=), or leave the update out of the step."
            )
        if not may_change and all(parameter.grad is None for parameter in self._model.parameters()):
            raise ValueError("compare: the step left no gradients. Pass one that runs forward and backward.")
        return state.digest()

    def measure_memory(self, step: Callable[[], object], state: TrainingState) -> None:
        """Count what is alive during one step."""
        state.put_back()
        held = [0]
        live = LiveStorages(parameters=self._model.parameters(), device=self._device)
        hook = self._model.register_forward_hook(lambda *_: held.append(live.live_bytes))
        try:
            with self._applied(), live:
                step()
        finally:
            hook.remove()
        self._held_bytes, self._peak_bytes = max(held), live.peak_bytes

    def time(self, step: Callable[[], object], state: TrainingState) -> None:
        """Time one step."""
        state.put_back()
        with self._applied():
            self._wait()
            start = time.perf_counter()
            step()
            self._wait()
            self.seconds.append(time.perf_counter() - start)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def row(self, plain: list[float]) -> ComparedPolicy:
        """Return what was measured, beside the times without actckpt of the same rounds."""
        ratios = [ours / theirs for ours, theirs in zip(self.seconds, plain, strict=True)]
        return ComparedPolicy(
            name=self._name,
            seconds=statistics.median(self.seconds),
            ratio=statistics.median(ratios),
            lowest_ratio=min(ratios),
            highest_ratio=max(ratios),
            held_bytes=self._held_bytes,
            peak_bytes=self._peak_bytes,
            same_bits=self.same_bits,
            blocks=len(self._forwards),
        )
