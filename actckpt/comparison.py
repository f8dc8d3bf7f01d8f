"""`compare`: time, held bytes and peak of one training step under several policies, side by side."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from actckpt._blocks.applied import applied_blocks, find_blocks
from actckpt._blocks.choosing import Blocks, check_not_meta
from actckpt._blocks.model_report import stayed
from actckpt._budget.budget_config import BudgetConfig, check_budget
from actckpt._budget.running import Candidate, device_of
from actckpt._core import devices
from actckpt._core.optimizers import Optimizers, optimizers_of
from actckpt._core.steps import Step
from actckpt._core.training_state import TrainingState
from actckpt._cycles.plan_step import settled_loop
from actckpt._offload.device import no_backend
from actckpt._text.presets import PRESETS
from actckpt._text.sizes import format_bytes
from actckpt._text.suggestions import did_you_mean
from actckpt._text.tables import aligned
from actckpt.action import Action
from actckpt.blocks import OPTION_NAMES, apply, remove
from actckpt.errors import BlocksError, PlanInfeasibleError
from actckpt.planner.plans import Plan
from actckpt.policies import choice_of
from actckpt.statistics import uncounted

__all__ = ["ComparedPolicy", "Comparison", "compare"]

PLAIN = "none"
_ACTIONS = tuple(action.value for action in Action)
_PLAN_OPTIONS = {"budget", "activation_budget", "blocks", "optimizer", "pins", "race"}
#: A dict with one of these has keyword arguments, not places.
_KEYWORDS = {"policy", "budget", "activation_budget"}


@dataclasses.dataclass(frozen=True)
class ComparedPolicy:
    """The measurements of one policy.

    Attributes:
        name: as passed to `compare`.
        seconds: of one step, the median over all rounds.
        ratio: to the step without actckpt of the same round, the median over all rounds.
        lowest_ratio, highest_ratio: over these rounds.
        held_bytes: live bytes when the forward of the model returns, beyond those before the step.
        peak_bytes: peak of the live bytes beyond those before the step, without gradients of parameters.
        same_bits: gradients, parameters and buffers after the step equal those of the step without actckpt.
        blocks: number of blocks to which the policy was applied.
        note: if the policy offloads nothing, or not everything, because tensors are small: what, and what to pass; else
            empty.
        samples_per_s, tokens_per_s: those of a step, as passed to `compare`, over `seconds`; None: not passed.
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
    note: str = ""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The measurements of `compare`, starting with the step without actckpt. `print` shows a table."""

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
        rates = [("samples/s", plain.samples_per_s), ("tokens/s", plain.tokens_per_s)]
        names = [name for name, rate in rates if rate is not None]
        lines = [("policy", "step", *names, "x none (lowest - highest)", "held", "peak", "of none", "bits")]
        for row in self.rows:
            ratio = f"{row.ratio:.2f} ({row.lowest_ratio:.2f} - {row.highest_ratio:.2f})"
            share = f"{100 * row.peak_bytes / max(plain.peak_bytes, 1):.0f} %"
            bits = "equal" if row.same_bits else "DIFFER"
            step = f"{1e3 * row.seconds:.1f} ms"
            per_s = [f"{rate:.4g}" for rate in (row.samples_per_s, row.tokens_per_s) if rate is not None]
            held, peak = format_bytes(row.held_bytes), format_bytes(row.peak_bytes)
            lines.append((row.name, step, *per_s, ratio, held, peak, share, bits))
        notes = "".join(f"\n{row.name}: {row.note}" for row in self.rows if row.note)
        return (
            f"{aligned(lines, left=1)}\nMedians of {self.rounds} round{'s' * (self.rounds > 1)}; bytes beyond what was "
            f"there before the step.{notes}"
        )

    def __str__(self) -> str:
        return self.table()

    def plot(self, path: str | Path) -> None:
        """Plot time against memory, as a PNG or SVG file.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        from actckpt._show.plot import plot_points

        points = {row.name: (row.peak_bytes, row.ratio, row.lowest_ratio, row.highest_ratio) for row in self.rows}
        plot_points(points, path=Path(path))


@uncounted()
def compare(
    step: Callable[[], object],
    *,
    model: torch.nn.Module,
    policies: Mapping[str, Any] | None = None,
    blocks: Blocks | None = None,
    optimizer: Optimizers = None,
    rounds: int = 5,
    samples: int | None = None,
    tokens: int | None = None,
) -> Comparison:
    """Run a training step under several policies and compare time, held bytes and peak.

    Every policy gives the same gradients; the comparison checks this bit for bit. Policies alternate within each round,
    so that load on the machine affects all of them alike. Model, gradients, optimizer and random state are restored
    afterwards, even if the step raises.

    Args:
        step: runs forward and backward, without arguments; may run the optimizer.
        model: what the step trains; no part of it is checkpointed.
        policies: by name, each as in `apply`, including a `Plan`, or a dict of keywords of `apply`: with `"policy"`,
            or with `"budget"` or `"activation_budget"`: steps run until its plan is made and tried, then it is timed.
            `"none"`, the step without actckpt, is always compared. None: `recompute` and `keep matmuls` (the preset
            `"matmuls"`), on a GPU also `offload`.
        blocks: as in `apply`.
        optimizer: the one that the step runs, if it does; several in a list.
        rounds: how often each policy is timed.
        samples, tokens: how many of them a step trains on; the table then has a column of samples or tokens per second.
    Returns:
        A row per policy.
    Raises:
        TypeError: `step` is no function, or `model` is no module.
        ValueError: the step takes arguments; it changes parameters and `optimizer` is missing; it leaves no gradients;
            `rounds`, `samples` or `tokens` is below 1; `policies` is no dict of policies by name.
        PlanInfeasibleError: no plan fits a budget.
        BlocksError: the model has no such blocks, or some are checkpointed already.
    Cost: `rounds + 2` steps per policy, those of `plan` per budget, and a copy of the training state in host memory.

    Example::

        >>> import torch, actckpt
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> x = torch.randn(2, 4)
        >>> found = actckpt.compare(lambda: model(x).sum().backward(), model=model, policies={"rerun": "recompute"})
        >>> [row.name for row in found.rows], all(row.same_bits for row in found.rows)
        (['none', 'rerun'], True)
    """
    _check_numbers(rounds=rounds, samples=1 if samples is None else samples, tokens=1 if tokens is None else tokens)
    checked = Step(step, "compare", model)
    _check_not_applied(model)
    check_not_meta(model, "compare")
    named = named_policies(policies, "compare", offloads=offloads(model))
    options = {name: options_of(policy, blocks, f"compare: policies[{name!r}]") for name, policy in named.items()}
    _check_budgets(options, model)
    optimizers = optimizers_of(optimizer, model, "compare")
    state = TrainingState(model, optimizers)
    try:
        candidates = [Candidate(PLAIN, model, {}, checked, state)]
        for name, each in options.items():
            forwards, opens = _forwards(model, each, step, optimizers, f"compare: policies[{name!r}]")
            candidates.append(Candidate(name, model, forwards, checked, state, opens))
        digests = []
        for candidate in candidates:
            digests.append(_first_step(candidate, checked, model, state))
            candidate.measure_memory()
        for _ in range(rounds):
            for candidate in candidates:
                candidate.time()
    finally:
        state.put_back()
    plain = candidates[0].seconds
    rows = [_row(each, plain, bits == digests[0]) for each, bits in zip(candidates, digests, strict=True)]
    return Comparison(tuple(_with_rates(row, samples, tokens) for row in rows), rounds)


def _with_rates(row: ComparedPolicy, samples: int | None, tokens: int | None) -> ComparedPolicy:
    rates = [None if number is None else number / row.seconds for number in (samples, tokens)]
    return dataclasses.replace(row, samples_per_s=rates[0], tokens_per_s=rates[1])


_NUMBERS = {"rounds": "each policy is timed so often", "samples": "of one step", "tokens": "of one step"}


def _check_numbers(**numbers: object) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"compare: {name}={number!r}. Pass a whole number from 1 on: {_NUMBERS[name]}.")


def _check_not_applied(model: torch.nn.Module) -> None:
    if applied := list(applied_blocks(model)):
        raise BlocksError(
            f"compare: {len(applied)} blocks are checkpointed already, the first is {applied[0]!r}. Call "
            "actckpt.remove(model) first: compare applies each policy itself."
        )


def offloads(model: torch.nn.Module) -> bool:
    """Return whether `offload` is a default policy: the model is on a device that gains by it."""
    device_type = device_of(model).type
    return not no_backend(device_type) and not devices.is_integrated(device_type)


def default_policies(*, offloads: bool) -> dict[str, Any]:
    """Return the default policies."""
    policies: dict[str, Any] = {"recompute": "recompute", "keep matmuls": "matmuls"}
    if offloads:
        policies["offload"] = "offload"
    return policies


def named_policies(policies: Any, who: str, *, offloads: bool) -> dict[str, Any]:
    """Return the compared policies by name, without the plain step.

    Raises:
        ValueError: they are no dict of policies by name; says what to pass.
    """
    if policies is None:
        return default_policies(offloads=offloads)
    if not isinstance(policies, Mapping):
        raise ValueError(
            f"{who}: policies is no dict but a {type(policies).__name__}. Pass policies by their names for the table: "
            f"policies={_by_name(policies)}."
        )
    for name in policies:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(
                f"{who}: policies has the key {name!r} ({type(name).__name__}), and keys are names for the table. One "
                "policy that is a dict goes by a name, too: policies={'mine': {...}}."
            )
    if policies.get(PLAIN) is not None:
        raise ValueError(
            f"{who}: policies[{PLAIN!r}] is {policies[PLAIN]!r}, but this is the name of the step without actckpt, "
            "which always has a row. Give the policy another name."
        )
    return {name: policy for name, policy in policies.items() if name != PLAIN}


def _by_name(value: Any) -> str:
    """Return how to write the argument as a dict, for an error."""
    if isinstance(value, str):
        return f"{{{value!r}: {value!r}}}"
    if isinstance(value, Plan):
        return "{'plan': plan}"
    if isinstance(value, (list, tuple)) and all(item in (*PRESETS, *_ACTIONS) for item in value):
        return f"{{{', '.join(f'{item!r}: {item!r}' for item in value)}}}"
    if isinstance(value, (list, tuple)):
        return f"{{'keep these': [{', '.join(map(str, value))}]}}"
    return "{'mine': policy}"


def options_of(policy: Any, blocks: Blocks | None, where: str) -> dict[str, Any]:
    """Return keyword arguments of `apply` for a policy, or of `plan` for a budget.

    A dict with none of these keywords is a policy: a table of places.

    Args:
        where: the argument that has the policy, for errors.
    Raises:
        ValueError: it is not a policy.
    """
    has_keywords = isinstance(policy, Mapping) and not _KEYWORDS.isdisjoint(policy)
    options = {"blocks": blocks, **(policy if has_keywords else {"policy": policy})}
    chosen = options.get("policy")
    if "policy" not in options:
        if unknown := sorted(map(str, options.keys() - _PLAN_OPTIONS)):
            near = did_you_mean(unknown, sorted(_PLAN_OPTIONS))
            known = ", ".join(sorted(_PLAN_OPTIONS))
            raise ValueError(f"{where}: unknown option {', '.join(unknown)} beside a budget.{near} Known: {known}.")
    elif chosen is not None and not isinstance(chosen, Plan):
        if isinstance(policy, Mapping) and not has_keywords:
            _check_no_options(policy, where)
        try:
            choice_of(chosen)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return {name: option for name, option in options.items() if name != "blocks" or option is not None}


def _check_no_options(table: Mapping[Any, Any], where: str) -> None:
    """Raise if a dict without a policy and a budget contains options, or misspells one of these two."""
    for key, action in table.items():
        has_action = isinstance(action, Action) or action in _ACTIONS
        if key in OPTION_NAMES and not has_action:
            raise ValueError(
                f"{where}: {key!r} is an option, and there is no policy and no budget beside it. Pass one: "
                f"{{'policy': 'recompute', {key!r}: ...}}."
            )
        # The name of a value may resemble that of another option.
        known = _KEYWORDS if has_action else OPTION_NAMES
        near = did_you_mean([str(key).lower()], sorted(known), cutoff=0.8)
        if near and key not in OPTION_NAMES:
            raise ValueError(f"{where}: unknown option {key!r}.{near} Known: {', '.join(sorted(OPTION_NAMES))}.")


def _check_budgets(policies: Mapping[str, Mapping[str, Any]], model: torch.nn.Module) -> None:
    """Raise, before any step runs, if a budget or its options are invalid."""
    for name, options in policies.items():
        where = f"compare: policies[{name!r}]"
        try:
            if "policy" not in options:
                check_budget(options, model, where)
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None


def _forwards(
    model: torch.nn.Module,
    options: dict[str, Any],
    step: Callable[[], object],
    optimizers: tuple[torch.optim.Optimizer, ...],
    where: str,
) -> tuple[dict[torch.nn.Module, Any], Callable[[], object] | None]:
    """Return the replaced forwards of blocks under `apply`, and what makes the loop of a budget watch the model.

    A budget's loop has settled: it has measured steps, made its plan, and tried it.
    """
    if "policy" in options:
        apply(model, **options)
        forwards = {block: block.forward for block in applied_blocks(model).values()}
        remove(model)
        return forwards, None
    chosen = find_blocks(model, options.get("blocks"), "compare")
    own = optimizers_of(options.get("optimizer"), model, "compare")
    try:
        loop, by_name = settled_loop(step, model, chosen, BudgetConfig.of(options, own or optimizers))
    except PlanInfeasibleError as error:
        raise PlanInfeasibleError(f"{where}: {error}", error.smallest_bytes, error.holds) from None
    for forward in by_name.values():
        forward.group.training = loop  # closed by `unpatch`
    return {forward.block: forward for forward in by_name.values()}, loop.open


def _first_step(candidate: Candidate, step: Step, model: torch.nn.Module, state: TrainingState) -> list[bytes]:
    """Warm up; return a digest of the state after the step."""
    with state.checked("compare"):
        candidate.run()
    step.check_gradients(bool(step.left_gradients) or state.has_changed_parameters())
    return state.digest()


def _row(candidate: Candidate, plain: list[float], same_bits: bool) -> ComparedPolicy:
    """Return the measurements, relative to the plain times of the same rounds."""
    forwards = candidate.forwards.values()
    ratios = [ours / theirs for ours, theirs in zip(candidate.seconds, plain, strict=True)]
    return ComparedPolicy(
        name=candidate.name,
        seconds=statistics.median(candidate.seconds),
        ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        held_bytes=candidate.held_bytes,
        peak_bytes=candidate.peak_bytes,
        same_bits=same_bits,
        blocks=len(candidate.forwards),
        note=stayed(
            [(forward.name, entry) for forward in forwards for entry in forward.group.recording.entries_of(forward)]
        ),
    )
