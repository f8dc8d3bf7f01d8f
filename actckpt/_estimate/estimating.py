"""One training step on fake tensors: the memory and time it would need."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from actckpt._blocks.applied import find_blocks
from actckpt._budget.budget_config import BudgetConfig
from actckpt._core import torch_private
from actckpt._core.simulated import simulating
from actckpt._core.sites import qualified_name
from actckpt._core.steps import Step as CheckedStep
from actckpt._core.storages import storages_of
from actckpt._cycles.plan_step import planned
from actckpt._estimate import kernels
from actckpt._estimate.bandwidth import Link, SimulatedOffloading
from actckpt._estimate.fakes import Fakes
from actckpt._estimate.roofline import Clock
from actckpt._estimate.targets import Target
from actckpt._offload.session import DEFAULT_MIN_BYTES
from actckpt._rerun.audit import without_audits
from actckpt._text.sizes import parse_bytes
from actckpt.blocks import apply, remove
from actckpt.errors import PlanInfeasibleError
from actckpt.memory import LiveStorages
from actckpt.planner.plans import Plan

__all__ = ["Figures", "Options", "Stepper", "explained"]

Step = Callable[[], object]
#: Keyword arguments of `apply`; None: the step without actckpt.
Options = dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Figures:
    """Memory and time of one step, in bytes and seconds; see `actckpt.estimation.EstimatedPolicy`."""

    held_bytes: int
    peak_bytes: int
    total_peak_bytes: int
    flops: int
    busy_seconds: float
    stall_seconds: float
    host_bytes: int
    blocks: int
    num_math_attention: int


class Stepper:
    """Runs steps of a model under policies, on fakes. Used inside the fakes' context, and as a context itself.

    Args:
        fakes: entered.
        optimizers: their state counts; each runs one step if the first training step does not run it.
    """

    def __init__(
        self, fakes: Fakes, target: Target, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...] = ()
    ) -> None:
        self._fakes, self._target, self._model, self._optimizers = fakes, target, model, optimizers
        self._contexts = contextlib.ExitStack()
        self._parameters: list[nn.Parameter] = []
        self._owned: list[Tensor] = []
        self._gradients: dict[int, int] = {}
        #: Bytes of parameters and buffers; of the gradients after a step; of the optimizer state.
        self.model_bytes = self.gradient_bytes = self.optimizer_bytes = 0
        self.runs_optimizer = False

    def __enter__(self) -> Stepper:
        self._contexts.enter_context(self._fakes.replacing(self._model, self._optimizers))
        self._contexts.enter_context(without_audits())  # tensors without numbers have no checksums
        self._take_stock()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._contexts.__exit__(*exc_info)

    def _take_stock(self) -> None:
        self._parameters = list(self._model.parameters())
        self._owned = [*self._parameters, *self._model.buffers()]
        self.model_bytes = _bytes_of(self._owned)

    def warm_up(self, step: CheckedStep) -> None:
        """Run a first step, which creates state for later ones: caches of modules, optimizer state.

        Raises:
            ValueError: it does not call backward.
        """
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        hooks = [parameter.register_post_accumulate_grad_hook(self._note_gradient) for parameter in trained]
        stepped: list[object] = []
        hooks.append(register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer)))
        try:
            with explained(self._model):
                step()
        finally:
            for hook in hooks:
                hook.remove()
        self.runs_optimizer, self.gradient_bytes = bool(stepped), sum(self._gradients.values())
        step.check_gradients(bool(self._gradients))
        for optimizer in self._optimizers:
            if not optimizer.state:
                optimizer.step()
        self.optimizer_bytes = _bytes_of([state for one in self._optimizers for state in one.state.values()])
        self._take_stock()

    def _note_gradient(self, parameter: Tensor) -> None:
        self._gradients[id(parameter)] = _bytes_of([parameter.grad])

    def run(self, step: Step, options: Options) -> Figures:
        """Run a step under a policy, starting without gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        clock, held = Clock(self._target), [0]
        link = Link(clock, self._target.link_bytes_per_s)
        everything = LiveStorages(device="meta")
        live = LiveStorages(parameters=self._parameters, device="meta")
        hook = self._model.register_forward_hook(lambda *_: held.append(live.live_bytes))
        try:
            with self._applied(options, link) as blocks, clock, everything, live, explained(self._model):
                step()
        finally:
            hook.remove()
        static_bytes = self.model_bytes + self.optimizer_bytes
        return Figures(
            held_bytes=max(held),
            peak_bytes=live.peak_bytes,
            total_peak_bytes=static_bytes + everything.peak_bytes,
            flops=clock.flops,
            busy_seconds=clock.busy_seconds,
            stall_seconds=clock.stall_seconds,
            host_bytes=link.host_bytes,
            blocks=blocks,
            num_math_attention=clock.calls.get(kernels.MATH_ATTENTION, 0),
        )

    def planned(self, step: Step, options: Mapping[str, Any], where: str) -> Plan:
        """Return the fastest plan that fits a budget, by estimated costs, without offloading.

        Args:
            options: as in `actckpt.plan`.
            where: the argument that has the budget, for errors.
        Raises:
            PlanInfeasibleError: no plan fits.
        """
        for parameter in self._parameters:
            parameter.grad = None
        blocks = find_blocks(self._model, options.get("blocks"), "estimate")
        config = BudgetConfig.of({**options, "race": False}, self._optimizers)
        clock = Clock(self._target)
        try:
            with clock, simulating(lambda: clock.seconds, self._target.memory_bytes), explained(self._model):
                return planned(step, self._model, blocks, config)
        except PlanInfeasibleError as error:
            raise PlanInfeasibleError(f"{where}: {error}", error.smallest_bytes, error.holds) from None

    def smallest_budget(self, step: Step, blocks: Any) -> int:
        """Return the bytes of the smallest budget for which there is a plan; blocks as in `actckpt.plan`."""
        try:  # the smallest budget that is valid
            return math.ceil(self.planned(step, {"budget": "1MiB", "blocks": blocks}, "estimate").peak_bytes)
        except PlanInfeasibleError as error:
            if error.smallest_bytes is None:
                raise
            return math.ceil(error.smallest_bytes)

    @contextlib.contextmanager
    def _applied(self, options: Options, link: Link) -> Iterator[int]:
        if options is None:
            yield 0
            return
        keywords = dict(options)
        policy = keywords["policy"] = kernels.policy_for_stand_ins(keywords["policy"])
        min_bytes = parse_bytes(keywords.get("min_bytes", DEFAULT_MIN_BYTES), what="min_bytes")
        names = apply(self._model, **keywords)
        with contextlib.ExitStack() as exits:
            exits.callback(remove, self._model)
            if policy == "offload":
                exits.close()
                modules = dict(self._model.named_modules())
                offloading = SimulatedOffloading(link, self._fakes.mode, self._owned, min_bytes)
                exits.enter_context(offloading.of([modules[name] for name in names]))
            yield len(names)


@contextlib.contextmanager
def explained(model: nn.Module | None) -> Iterator[None]:
    """If an operator needs the numbers of fake tensors, raise a one-line error about it.

    Raises:
        ValueError: one does.
    """
    try:
        yield
    except torch_private.needs_numbers as error:
        raise ValueError(_needs_numbers(error, model)) from None


def _bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages behind tensors, each once."""
    return sum({id(storage): storage.nbytes() for storage in storages_of(list(tensors))}.values())


def _needs_numbers(error: BaseException, model: nn.Module | None) -> str:
    operator = getattr(error, "func", "an operator")
    module, line = _where(error.__traceback__, model)
    return (
        f"estimate: {operator} in {module} ({line}) needs the numbers of a tensor, and without a device there are only "
        "shapes. Leave it out of the step, or give it a fixed size."
    )


def _where(traceback: TracebackType | None, model: nn.Module | None) -> tuple[str, str]:
    """Return the module whose method was running, and the last line outside of torch and actckpt."""
    module, line = "the step", "unknown line"
    folders = (torch.__path__[0], __file__.rpartition("_estimate")[0])
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = f"module {qualified_name(model or owner, owner)!r}"
        if not frame.f_code.co_filename.startswith(folders):
            line = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return module, line
