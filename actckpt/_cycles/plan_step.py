"""`actckpt.plan`: the loop of `apply(budget=...)`, driven by calling a step instead of by training."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch

from actckpt._blocks.applied import CheckpointedForward, forwards_in, patch, unpatch
from actckpt._budget.bandwidth import flush
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.fake_collectives import Exchanges, num_ranks
from actckpt._budget.running import RECOMPUTE, device_of
from actckpt._core import devices
from actckpt._core.steps import Step
from actckpt._core.training_state import TrainingState
from actckpt._cycles.loop import BudgetLoop
from actckpt._text.listed import listed
from actckpt.errors import BlocksError
from actckpt.memory import LiveStorages
from actckpt.planner.plans import Plan
from actckpt.statistics import uncounted

__all__ = ["planned", "settled_loop"]

#: More steps than the loop needs with all of its candidates, and until a cycle is measured.
_MOST_STEPS, _MOST_MEASURED = 200, 4
_STEP = "lambda: model(x).sum().backward()"


@uncounted()
def planned(
    step: Callable[[], object], model: torch.nn.Module, blocks: dict[str, torch.nn.Module], config: BudgetConfig
) -> Plan:
    """Return the fastest plan that fits. Raises the errors of `actckpt.plan`."""
    plan = settled_loop(step, model, blocks, config)[0].plan
    assert plan is not None
    return plan


def settled_loop(
    step: Callable[[], object], model: torch.nn.Module, blocks: dict[str, torch.nn.Module], config: BudgetConfig
) -> tuple[BudgetLoop, dict[str, CheckpointedForward]]:
    """Run a step until the loop of a budget has settled; return the loop, closed, and the forwards of its blocks.

    Everything is as before then. Raises the errors of `actckpt.plan`.
    """
    checked = Step(step, "plan", model)
    state = TrainingState(model, config.optimizers)
    patch(blocks, dict.fromkeys(blocks, RECOMPUTE), model)
    forwards = forwards_in(blocks)
    for forward in forwards.values():  # for errors about blocks that do not run
        forward.group.is_checked = True
    outside = _OutsideCycles(model, config)
    config = dataclasses.replace(config, on_infeasible="raise", more_bytes=outside.nbytes)
    loop = BudgetLoop(model, forwards, config)
    try:
        with _explained(checked, model, blocks, state):
            exchanges = Exchanges()
            with state.checked("plan"), exchanges if num_ranks() > 1 else contextlib.nullcontext(), outside:
                checked()
            if not exchanges.is_empty:
                raise BlocksError(
                    f"plan: the step exchanges tensors with other ranks, {num_ranks()} in all, and how often it must "
                    "run differs between them. Pass the budget to actckpt.apply, which plans while the model trains."
                )
            _check_calls(loop, tuple(blocks))
            # Results of compiled code are kept in its first call, and blocks may be added.
            _repeat(checked, state, _MOST_MEASURED, lambda: loop.is_measured)
            _check_backward(loop, tuple(blocks))
        _repeat(checked, state, _MOST_STEPS, lambda: loop.is_settled)
    finally:
        loop.close()
        unpatch({name: forward.block for name, forward in forwards.items()})
        state.put_back()
        flush(device_of(model))
    return loop, forwards


def _repeat(step: Step, state: TrainingState, most: int, until: Callable[[], bool]) -> None:
    """Run a step from the same state until a condition holds.

    Optimizer state that the first one made stays, since it is there in each later training step.
    """
    for _ in range(most):
        if until():
            break
        state.put_back(keeps_new=True)
        step()


class _OutsideCycles:
    """Counts what a step allocates before the forward of the model, where its cycle begins, and frees: a batch.

    Enter it around the first step.
    """

    def __init__(self, model: torch.nn.Module, config: BudgetConfig) -> None:
        self._config, self._device, self._thread = config, device_of(model), threading.get_ident()
        self._live = LiveStorages(parameters=model.parameters(), device=self._device)
        self._contexts = contextlib.ExitStack()
        #: Bytes alive when the forward begins, and those of them that the step frees.
        self._begin_bytes = self._freed_bytes = 0

    def nbytes(self) -> int:
        """Return the bytes that count in a cycle that begins now."""
        self._begin_bytes = self._begin_bytes or self._live.live_bytes
        if threading.get_ident() == self._thread:  # a mode leaves only the stack of its own thread
            self._contexts.close()
        return self._freed_bytes

    def __enter__(self) -> None:
        if not self._config.is_total or devices.counting(self._device) is None:  # else the allocator counts it
            self._contexts.enter_context(self._live)

    def __exit__(self, *_: object) -> None:
        self._contexts.close()
        # What stays alive exists before the next step: caches that the first step fills.
        self._freed_bytes = max(self._begin_bytes - self._live.live_bytes, 0)


@contextlib.contextmanager
def _explained(
    step: Step, model: torch.nn.Module, blocks: dict[str, torch.nn.Module], state: TrainingState
) -> Iterator[None]:
    """Explain an error about blocks by why they did not run, and one about backward by what is known of it."""
    try:
        yield
    except BlocksError as error:
        unpatch(blocks)
        reason = _why_not_run(step, model, blocks, state)
        patch(blocks, dict.fromkeys(blocks, RECOMPUTE), model)
        raise BlocksError(f"plan: {reason}" if reason else f"{error}{step.hint()}") from None


def _check_calls(loop: BudgetLoop, blocks: tuple[str, ...]) -> None:
    """Raise if the one step that ran cannot be planned.

    Raises:
        BlocksError: a block did not run, or ran in several forwards of the model.
    """
    for name in blocks:
        num_calls = loop.num_calls[name]
        if not num_calls or (num_calls > 1 and loop.num_forwards != 1):
            raise BlocksError(
                f"plan: block {name!r} ran {num_calls} times in the step, and the model was called "
                f"{loop.num_forwards} times, expected once. Pass a step with one forward of the model, or other "
                "blocks=."
            )


def _check_backward(loop: BudgetLoop, blocks: tuple[str, ...]) -> None:
    if not loop.is_measured:
        raise BlocksError(f"plan: backward did not run through block {blocks[0]!r}. Pass a step with its backward.")


def _why_not_run(
    step: Callable[[], object], model: torch.nn.Module, blocks: Mapping[str, torch.nn.Module], state: TrainingState
) -> str:
    """Run a step once more and return why blocks did not run in it with gradients.

    The text is empty if all did, and if the step raises now.
    """
    calls, trained = Counter[torch.nn.Module](), Counter[torch.nn.Module]()

    def called(module: torch.nn.Module, _: object) -> None:
        calls[module] += 1
        trained[module] += torch.is_grad_enabled()

    with contextlib.ExitStack() as exits:
        for module in {model, *blocks.values()}:
            exits.callback(module.register_forward_pre_hook(called).remove)
        state.put_back()
        try:
            step()
        except Exception:  # the step may run only once: report the first run
            return ""
    idle = [name for name, block in blocks.items() if not trained[block]]
    if not idle:
        return ""
    kind, of = type(model).__name__, f"{len(idle)} of {len(blocks)} blocks"
    if without_gradients := [name for name in idle if calls[blocks[name]]]:
        return (
            f"{len(without_gradients)} of {len(blocks)} blocks ran without gradients in the step (torch.no_grad, "
            f"torch.inference_mode): {listed(without_gradients)}. Pass a step that trains: {_STEP}."
        )
    if calls[model]:
        return (
            f"{of} were not called in the step, though the {kind} was: {listed(idle)}. Pass blocks=: those that it "
            "calls as modules (at most methods or parts of these were called)."
        )
    if len(idle) == len(blocks):
        return (
            f"the step called neither the {kind} that was given as model nor any of its {len(blocks)} blocks. Pass as "
            f"model what the step trains, and a step that calls it: {_STEP}."
        )
    return (
        f"{of} were not called in the step, and neither was the {kind} that was given as model: {listed(idle)}. Pass "
        "as model the part of it that the step calls, or as blocks= those that run."
    )
