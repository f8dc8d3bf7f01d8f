"""`estimate`: memory and time of a training step on a device that is not there, under several policies."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from actckpt._blocks.applied import applied_blocks
from actckpt._blocks.choosing import Blocks
from actckpt._budget.budget_config import check_budget
from actckpt._core.optimizers import Optimizers, optimizers_of
from actckpt._core.steps import Step
from actckpt._estimate.estimating import Figures, Stepper
from actckpt._estimate.fakes import Fakes
from actckpt._estimate.targets import Target, named_target
from actckpt._text.sizes import format_bytes, format_seconds
from actckpt._text.tables import aligned
from actckpt.action import Action
from actckpt.comparison import PLAIN, named_policies, options_of
from actckpt.errors import BlocksError
from actckpt.planner.plans import Plan
from actckpt.policies import PerOp
from actckpt.statistics import uncounted

__all__ = ["Estimate", "EstimatedPolicy", "Target", "estimate"]

_OFFLOADS = (Action.OFFLOAD, Action.PREFER_OFFLOAD, "offload", "prefer_offload")


_NOT_SHOWN = (
    "Tensors without bytes do not show what that does: estimate 'offload' for whole blocks, measure it with "
    "actckpt.compare, or solve a plan from a table of costs (actckpt.planner.simulate)."
)

#: docs/estimate-accuracy.md has the figures.
ERROR_OF_SECONDS = (
    "Seconds are those of large kernels. Measured on GPUs: 1 to 3 % off where matmuls dominate (a Llama), "
    "55 % too short where convolutions do (a UNet)."
)
NO_OPTIMIZER = "They are those of forward and backward: the step runs no optimizer."


@dataclasses.dataclass(frozen=True)
class EstimatedPolicy:
    """The estimate for one policy.

    Attributes:
        name: as passed to `estimate`.
        seconds: of one step of large kernels, by the rates of the target (docs/estimate-accuracy.md).
        recompute_seconds: of these, recomputation.
        stall_seconds: of these, waiting for the link.
        host_bytes: peak of the bytes that are offloaded to host memory.
        flops: floating-point operations of matrix products, convolutions and attention.
        held_bytes: live bytes when the forward of the model returns, beyond those before the step.
        peak_bytes: peak of the live bytes beyond those before the step, without gradients of parameters: what `compare`
            measures.
        total_peak_bytes: peak of all live bytes: parameters, buffers, optimizer state, gradients, activations.
            Workspaces
            of kernels, and overhead of the allocator, do not count.
        blocks: number of blocks to which the policy was applied.
    """

    name: str
    seconds: float
    recompute_seconds: float
    stall_seconds: float
    host_bytes: int
    flops: int
    held_bytes: int
    peak_bytes: int
    total_peak_bytes: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The result of `estimate`, starting with the step without actckpt. `print` shows a table.

    Attributes:
        rows: one per policy.
        target: the device.
        model_bytes, gradient_bytes, optimizer_bytes: of parameters and buffers, of their gradients after a step, and of
            the optimizer state.
        runs_optimizer: whether the step runs an optimizer, whose seconds count then.
        notes: assumptions that may not hold on the device.
    """

    rows: tuple[EstimatedPolicy, ...]
    target: Target
    model_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    runs_optimizer: bool
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> EstimatedPolicy:
        """Return the row of a policy.

        Raises:
            KeyError: it was not estimated.
        """
        return {row.name: row for row in self.rows}[name]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """Return a table, one line per policy, and the assumptions."""
        plain = self.rows[0]
        lines = [("policy", "step", "x none", "recompute", "waits", "held", "peak", "of none", "all", "host")]
        for row in self.rows:
            lines.append(
                (
                    row.name,
                    format_seconds(row.seconds),
                    f"{row.seconds / plain.seconds:.2f}" if plain.seconds else "-",
                    format_seconds(row.recompute_seconds),
                    format_seconds(row.stall_seconds),
                    format_bytes(row.held_bytes),
                    format_bytes(row.peak_bytes),
                    f"{100 * row.peak_bytes / max(plain.peak_bytes, 1):.0f} %",
                    format_bytes(row.total_peak_bytes),
                    format_bytes(row.host_bytes),
                )
            )
        parts = [f"parameters and buffers {format_bytes(self.model_bytes)}"]
        parts.append(f"gradients {format_bytes(self.gradient_bytes)}")
        if self.optimizer_bytes:
            parts.append(f"optimizer {format_bytes(self.optimizer_bytes)}")
        what = f"Estimated for {self.target.name}; all: with {', '.join(parts)}."
        notes = self.notes if self.runs_optimizer else (NO_OPTIMIZER, *self.notes)
        return "\n".join([aligned(lines, left=1), what, ERROR_OF_SECONDS, *notes])

    def __str__(self) -> str:
        return self.table()


def estimate(
    step: Callable[[], object],
    *,
    model: torch.nn.Module,
    policies: Mapping[str, Any] | None = None,
    target: str | Target = "h100",
    blocks: Blocks | None = None,
    optimizer: Optimizers = None,
) -> Estimate:
    """Estimate memory and time of a training step on a device, per policy, without running it.

    The step runs on fake tensors, which have shapes but no bytes: nothing is allocated, no device is needed, and the
    model may be on the meta device. Bytes are those of the operators that actually run, including replays and reruns.
    Model, gradients, optimizer and random state are restored afterwards, even if the step raises; other Python objects
    that the step changes (a scheduler, a list of losses) are not.

    Args:
        step: runs forward and backward, without arguments; may run the optimizer. Devices that it names are replaced.
        model: what the step trains; no part of it is checkpointed. It is neither run nor changed.
        policies: as in `compare`, including existing plans and budgets. A plan for a budget is made of estimated costs
            and does not offload; shares are of the target's memory. Policies that offload single values (`PerOp` with
            `"offload"`, `offload_inputs`) raise. None: `recompute`, `keep matmuls`, and `offload` except for the CPU.
        target: a name (`Target.named`), or a `Target` with your own rates.
        blocks: as in `apply`.
        optimizer: its state counts, even if the step does not run it; several in a list.
    Returns:
        A row per policy.
    Raises:
        TypeError: `step` is no function, or `model` is no module.
        ValueError: the target is unknown; the step takes arguments, calls no backward, needs the numbers of a tensor
            (`.item()`, a boolean mask), or runs an optimizer that was not passed; `policies` is no dict of policies by
            name, or one of them is invalid or offloads single values.
        PlanInfeasibleError: no plan fits a budget.
        BlocksError: the model has no such blocks, or some are checkpointed already.
    Cost: a step per policy and one more, a dozen per budget, some tenths of a millisecond per operator, whatever the
    sizes.

    Example::

        >>> import torch, actckpt
        >>> with torch.device("meta"):
        ...     layer = torch.nn.TransformerEncoderLayer(1024, 16, batch_first=True, dropout=0.0)
        ...     model = torch.nn.TransformerEncoder(layer, 4)
        ...     x = torch.empty(16, 2048, 1024)
        >>> found = actckpt.estimate(lambda: model(x).sum().backward(), model=model, target="h200")
        >>> found["recompute"].peak_bytes < found["none"].peak_bytes
        True
    """
    device = target if isinstance(target, Target) else named_target(target)
    checked = Step(step, "estimate", model)
    _check(model)
    optimizers = optimizers_of(optimizer, model, "estimate")
    named = named_policies(policies, "estimate", offloads=not device.is_cpu)
    options = {name: checked_options(policy, blocks, f"estimate: policies[{name!r}]") for name, policy in named.items()}
    with uncounted(), Fakes(device) as fakes, Stepper(fakes, device, model, optimizers) as stepper:
        stepper.warm_up(checked)
        return estimate_with(stepper, checked, device, options)


def estimate_with(
    stepper: Stepper,
    step: Callable[[], object],
    target: Target,
    options: Mapping[str, dict[str, Any]],
    progress: Callable[[str], object] = lambda _: None,
) -> Estimate:
    """Return the estimate of a stepper that is warmed up.

    Args:
        options: keywords of `apply` by the name of the policy, as `checked_options` returns them.
        progress: called with the name of the running policy.
    """
    figures: dict[str, Figures] = {}
    for name, keywords in {PLAIN: None, **options}.items():
        progress(name)
        if keywords is not None and "policy" not in keywords:
            keywords = {"policy": stepper.planned(step, keywords, f"estimate: policies[{name!r}]")}
        figures[name] = stepper.run(step, keywords)
    plain = figures[PLAIN]
    rows = [
        EstimatedPolicy(
            name=name,
            seconds=row.busy_seconds + row.stall_seconds,
            recompute_seconds=max(0.0, row.busy_seconds - plain.busy_seconds),
            stall_seconds=row.stall_seconds,
            host_bytes=row.host_bytes,
            flops=row.flops,
            held_bytes=row.held_bytes,
            peak_bytes=row.peak_bytes,
            total_peak_bytes=row.total_peak_bytes,
            blocks=row.blocks,
        )
        for name, row in figures.items()
    ]
    return Estimate(
        rows=tuple(rows),
        target=target,
        model_bytes=stepper.model_bytes,
        gradient_bytes=stepper.gradient_bytes,
        optimizer_bytes=stepper.optimizer_bytes,
        runs_optimizer=stepper.runs_optimizer,
        notes=_notes(plain, target),
    )


def _notes(plain: Figures, target: Target) -> tuple[str, ...]:
    if target.is_cpu or not plain.num_math_attention:
        return ()
    return (
        f"{plain.num_math_attention} calls of attention ran as products and a softmax, since the kernel that stands "
        f"for the fused one of {target.name} does not take their arguments: there they may hold less.",
    )


def _check(model: torch.nn.Module) -> None:
    if applied := list(applied_blocks(model)):
        raise BlocksError(
            f"estimate: {len(applied)} blocks are checkpointed already, the first is {applied[0]!r}. Call "
            "actckpt.remove(model) first: estimate applies each policy itself."
        )


def checked_options(policy: Any, blocks: Blocks | None, where: str) -> dict[str, Any]:
    """Return keywords of `apply` for a policy, or of `plan` for a budget.

    Args:
        where: the argument that has the policy, for errors.
    Raises:
        ValueError: it is invalid, or offloads single values.
    """
    options = options_of(policy, blocks, where)
    if "policy" not in options:
        check_budget(options, torch.nn.Module(), where)
        return options
    chosen = options["policy"]
    if chosen in ("offload", Action.OFFLOAD):
        options.pop("to", None)  # the memory of the host
        return {**options, "policy": "offload"}
    if options.get("offload_inputs"):
        raise ValueError(f"{where} has offload_inputs, which moves single values. {_NOT_SHOWN}")
    if _offloads(chosen):
        raise ValueError(f"{where} offloads single values. {_NOT_SHOWN}")
    if callable(chosen) and not isinstance(chosen, (PerOp, Plan)):
        options["policy"] = _asked(where, chosen)
    return options


def _offloads(policy: Any) -> bool:
    if isinstance(policy, PerOp):
        return policy.moves
    if isinstance(policy, Plan):
        return any(action in _OFFLOADS for block in policy.actions for action in block.values())
    if isinstance(policy, Mapping):
        return any(action in _OFFLOADS for action in policy.values())
    return isinstance(policy, (str, Action)) and policy in _OFFLOADS


def _asked(where: str, policy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(policy)
    def asked(*args: Any, **kwargs: Any) -> Any:
        answer = policy(*args, **kwargs)
        if "OFFLOAD" in str(answer).upper():
            raise ValueError(f"{where} offloads single values. {_NOT_SHOWN}")
        return answer

    return asked
