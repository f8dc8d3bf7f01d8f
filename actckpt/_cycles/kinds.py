"""One kind of cycle: its measurements, its plan, and its next stage (see `loop`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from actckpt._blocks.applied import CheckpointedForward, Settings
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.offloading import offloaded_bytes
from actckpt._budget.running import RECOMPUTE, settings_of
from actckpt._core import devices
from actckpt._cycles.cycle_model import CycleModel
from actckpt._cycles.settled_block import SettledBlock
from actckpt._cycles.solving import Solving
from actckpt._cycles.timeline import Call, Cycle, is_larger, most_given, total_given
from actckpt._cycles.trials import Trials, trials_of
from actckpt._cycles.warnings import Infeasible
from actckpt.errors import PlanInfeasibleError
from actckpt.planner.costs import BlockClass, CostTable
from actckpt.planner.plans import Plan
from actckpt.planner.simulation import needs

__all__ = ["BudgetConfig", "Kind"]

#: Maximum number of correction rounds, and of further ones under lower limits if no plan has fit; the share of the
#: budget that may stay unused while values are dropped.
_MOST_ROUNDS, _MOST_LOWER_LIMITS, _UNUSED = 3, 2, 0.02
#: A plan that offloads and exceeds both budget and prediction by more than this share frees less than expected.
_HELD = 0.02
#: Static bytes count as changed beyond this share (if lower: in 16 cycles in a row); a budget of free memory, read
#: every 16 cycles, beyond the second share.
_CHANGE, _CHANGE_OF_BUDGET, _CYCLES_PER_LOOK = 0.01, 0.1, 16
#: Cycles without any gradients before only one in `_CYCLES_PER_LOOK` is metered; maximum number of measured cycles.
_FIRST_EMPTY, _MOST_MEASURED = 16, 16
#: Maximum number of metered cycles before the plan is kept although none resembled the measured one, which means: at
#: least this share of its input bytes.
_MOST_METERED, _ALIKE = 16, 0.99
#: Maximum number of corrections after settled cycles that exceeded the budget, or a refused plan's peak by this share.
_MOST_EXCESSES, _TOLERANCE = 16, 0.01
#: What a plan may need after one ran out of memory, as a share.
_LESS = 0.9
#: On a device, one in this many settled cycles resets the peak.
_CYCLES_PER_PEAK = 64

Stage = Literal["measure", "fit", "try", "settled"]


class Kind:
    """Cycles that share a plan.

    Args:
        others: returns all kinds of cycles of the model; an error names the smallest budget that all of them meet.

    Attributes:
        stage: the purpose of the next cycle.
        plan: the plan to keep; None: not made yet.
        outlives_outputs: whether a backward reached blocks after all outputs of the forward were dropped.
        left_bytes: bytes that an earlier cycle of the step left behind, when that was last metered.
        running_plan: the plan of the cycle, in a trial the candidate's; None: everything is recomputed.
        refused: why the plan exceeds the budget, or why there is none; empty if it fits.
    """

    stage: Stage = "measure"
    _stage_before: Stage = "measure"  #: To return to if a measured cycle shows nothing new.
    plan: Plan | None = None
    running_plan: Plan | None = None
    refused = ""
    is_measured_now = outlives_outputs = False
    left_bytes = 0

    def __init__(
        self,
        model: torch.nn.Module,
        forwards: Mapping[str, CheckpointedForward],
        config: BudgetConfig,
        infeasible: Infeasible,
        others: Callable[[], Iterable[Kind]],
    ) -> None:
        self._others = others
        self._module, self._forwards, self._config = model, forwards, config
        self._solving = Solving(model, config)
        self._infeasible = infeasible
        self._model: CycleModel | None = None
        #: Plans that ran under a meter since the model was measured or corrected, with their peaks.
        self._attempts: list[tuple[Plan, float]] = []
        self._trials: Trials | None = None
        self._settings: list[Mapping[str, Settings]] = []
        #: Shapes and flags of each forward, in the cycle that the plan was made for and in the measured one.
        self._forward_keys: list[Any] = []
        self._measured_keys: list[Any] = []
        self._static_bytes = self._budget_bytes = 0.0
        #: What plans may need, if the device did not have the memory of an earlier one, or earlier ones needed more.
        self._most_bytes = math.inf
        self._num_cycles = self._num_measured = self._num_less = 0
        self._num_excesses = 0
        #: Successive cycles that were to be measured but had no block with gradients.
        self._num_empty = 0
        #: Measured orders of forwards and backwards.
        self._orders: set[tuple[tuple[int, int, bool], ...]] = set()
        #: Whether the plan was solved from the current model.
        self._is_solved = False
        #: Whether cycles ran under a plan: no error is raised after that.
        self._has_run = False
        #: Why no plan fits according to the corrected model.
        self._infeasible_error: PlanInfeasibleError | None = None

    @property
    def num_trials_left(self) -> int:
        return 0 if self._trials is None else self._trials.num_cycles_left

    @property
    def _limit_bytes(self) -> float:
        return min(self._budget_bytes, self._most_bytes)

    @property
    def can_be_shared(self) -> bool:
        """Whether smaller cycles may run its plan: it has run, and it fits."""
        return self._has_run and not self.refused

    @property
    def begins_to_measure(self) -> bool:
        """Whether the next cycle may be measured; false for a while if measured cycles show nothing."""
        return self.stage == "measure" and self._num_measured < _MOST_MEASURED

    @property
    def looks(self) -> bool:
        """Whether the cycle resets the peak, so that an older, higher one does not hide its own."""
        return self.stage == "settled" and self._num_cycles % _CYCLES_PER_PEAK == 0

    def begin(self, static_bytes: float, *, is_smaller: bool = False) -> bool:
        """A cycle starts; return whether it is metered.

        Args:
            static_bytes: bytes from before the cycle that count toward the budget.
            is_smaller: it is of another kind, whose shapes are larger in no dimension.
        Raises:
            PlanInfeasibleError: no plan fits, and the user asked for this error.
        """
        self.is_measured_now = self.stage == "measure" and not is_smaller
        if self.is_measured_now:
            self._measured_keys, self.running_plan = [], None
            if self._num_empty > _FIRST_EMPTY and self._num_empty % _CYCLES_PER_LOOK:
                self._num_empty += 1
                self.is_measured_now = False
            return self.is_measured_now
        if self.stage != "measure" and self._is_changed(static_bytes):
            self._plan_anew()
            self._static_bytes, self._num_less = static_bytes, 0
        self._num_cycles += 1
        if self.stage == "fit" and not self._is_solved:
            self._solve(static_bytes)
        if is_smaller or (self._trials is None and self.running_plan is None):
            assert self.plan is not None
            self._run(self.plan)
        if self._trials is None or is_smaller:
            return self.stage == "fit" and not is_smaller
        candidate = self._trials.next()
        self._run(candidate.probe or candidate.plan)
        return not candidate.is_measured

    def settings(self, number: int, key: Any) -> Mapping[str, Settings] | None:
        """Return how blocks run in a forward of the cycle; None: they recompute everything.

        Args:
            number: of the forward in the cycle.
            key: its shapes and flags.
        """
        if self.is_measured_now:
            self._measured_keys.append(key)
        if self.running_plan is None:
            return dict.fromkeys(self._forwards, RECOMPUTE)
        is_known = number < min(len(self._settings), len(self._forward_keys)) and self._forward_keys[number].holds(key)
        return self._settings[number] if is_known else None

    def end(self, cycle: Cycle, blocks: Sequence[SettledBlock]) -> None:
        if self.is_measured_now:
            self._measured(cycle, blocks)
        elif cycle.is_void or self._model is None or not cycle.num_backwards:
            return
        elif not self.knows_order(cycle) or (cycle.meter is not None and self._model.idle - cycle.idle_calls()):
            self.measure_again()  # it ran calls that the plan does not cover
        elif self.stage == "settled" and self._exceeds(cycle.risen_bytes):
            self.stage, self._attempts = "fit", []
        elif self._trials is not None:
            self._tried(cycle)
        elif self.stage == "fit" and (self._is_alike(cycle) or self._num_cycles >= _MOST_METERED):
            self._fit(cycle)

    def knows_order(self, cycle: Cycle) -> bool:
        """Return whether the order of a cycle's forwards and backwards was measured."""
        return not cycle.num_backwards or tuple(cycle.order) in self._orders

    def measure_again(self) -> bool:
        """A plan did not cover what ran; return whether the next cycle is measured."""
        if self._num_measured >= _MOST_MEASURED:
            return False
        if self.stage != "measure":
            self._stage_before, self.stage = self.stage, "measure"
        return True

    def plan_with_less(self) -> None:
        """The device did not have the memory of the running plan: the next one needs less."""
        if self.running_plan is not None:
            self._most_bytes = _LESS * min(self._most_bytes, self.running_plan.peak_bytes)
            self._plan_anew()

    def _plan_anew(self) -> None:
        self._attempts, self._trials, self.stage, self._is_solved = [], None, "fit", False

    def given_bytes(self, number: int) -> dict[str, tuple[float, ...]]:
        """Return, per block, the maximum bytes of each tensor passed to it in a forward of the measured cycle."""
        sizes = {} if self._model is None else most_given(self._model.calls)
        return {name: nbytes for (forward, name), nbytes in sizes.items() if forward == number}

    # Stages

    def _measured(self, cycle: Cycle, blocks: Sequence[SettledBlock]) -> None:
        """Take over the measurements of a cycle, unless they are less than what is known."""
        self._num_measured += 1
        self._num_empty = 0 if cycle.calls else self._num_empty + 1
        if cycle.is_void or not cycle.calls or len(blocks) != len(cycle.calls) or not cycle.num_backwards:
            self.stage = self._stage_before
            return
        is_new = tuple(cycle.order) not in self._orders
        self._orders.add(tuple(cycle.order))
        if self._model is not None and is_new and self._is_alike(cycle):
            model = self._model
            model.add(cycle, blocks)
        else:
            model = CycleModel(cycle, blocks)
        before = () if self._model is None else self._model.calls
        is_less = total_given(model.calls) < _ALIKE * total_given(before)
        if self._model is not None and is_less and not is_larger(model.calls, before):
            self.stage = self._stage_before
            return
        self._model, self._attempts, self._trials, self.plan = model, [], None, None
        self.stage, self._is_solved, self._num_cycles, self._static_bytes = "fit", False, 0, cycle.static_bytes
        self._forward_keys = self._measured_keys

    def _is_alike(self, cycle: Cycle) -> bool:
        """Return whether the same calls ran as in the measured cycle, with inputs of the same size."""
        assert self._model is not None
        calls = self._model.calls
        is_same = len(calls) == len(cycle.calls) and all(map(Call.is_same, calls, cycle.calls))
        if cycle.meter is not None and cycle.idle_calls() != self._model.idle:
            return False
        return is_same and total_given(cycle.calls) >= _ALIKE * total_given(calls)

    def _solve(self, static_bytes: float) -> None:
        assert self._model is not None
        self._static_bytes = static_bytes
        costs = self._solving.costs(self._model, static_bytes)
        self._budget_bytes = self._solving.budget_bytes(self._model, costs)
        self.refused, self._infeasible_error = "", None
        try:
            self.plan = self._solving.plan(self._model, costs, self._budget_bytes, self._limit_bytes)
        except PlanInfeasibleError as error:
            self.plan = self._smallest(costs, error)
        self._is_solved = True
        self._run(self.plan)

    def _smallest(self, costs: CostTable, error: PlanInfeasibleError) -> Plan:
        """No plan fits: return the smallest one, with a warning."""
        assert self._model is not None
        least, is_late = error.smallest_bytes, self._has_run
        if least is None:
            raise error
        if least <= self._budget_bytes:  # only the device does not have it
            return self._solving.plan(self._model, costs, self._budget_bytes, least)
        others_bytes = max((kind.least_bytes() for kind in self._others() if kind is not self), default=0.0)
        facts = error, self._budget_bytes, self._static_bytes, self._forwards, others_bytes
        user_error = self._solving.user_error(self._model, costs, *facts)
        if self._attempts:  # the observed memory of the smallest plan decides
            self._infeasible_error = user_error
            return self._solving.plan(self._model, costs, self._budget_bytes, least)
        self.refused, self.plan = str(user_error), None
        if self._infeasible.raises and not is_late:
            raise user_error
        self._infeasible.warn(user_error, is_late=is_late)
        return self._solving.plan(self._model, costs, self._budget_bytes, least)

    def least_bytes(self) -> float:
        """Return the smallest budget for this kind if it exceeds the user's budget, else 0."""
        return 0.0 if self._model is None else self._solving.least_bytes(self._model, self._static_bytes)

    def _fit(self, cycle: Cycle) -> None:
        """A metered cycle under the plan has ended: correct the model and solve again, or keep the plan."""
        assert self._model is not None and self.plan is not None
        self._attempts.append((self.plan, cycle.peak_bytes))
        expected_bytes = max(self._budget_bytes, self.plan.peak_bytes)
        is_held = cycle.peak_bytes > (1 + _HELD) * expected_bytes and any(offloaded_bytes(self.plan))
        if is_held and self._stop_offloading():
            return
        is_over = cycle.peak_bytes > self._budget_bytes
        is_unused = cycle.peak_bytes < (1 - _UNUSED) * self._limit_bytes and self.plan.overhead_seconds > 0.0
        if (is_over or is_unused) and len(self._attempts) <= _MOST_ROUNDS and self._solve_again(cycle):
            return
        # The fastest one that fits, or the smallest if none does.
        fitting = [attempt for attempt in self._attempts if attempt[1] <= self._budget_bytes]
        best, peak_bytes = min(
            fitting or self._attempts, key=lambda each: each[0].overhead_seconds if fitting else each[1]
        )
        fits = bool(fitting)
        if not fits and (self._leave_room(cycle, peak_bytes) or self._stop_offloading()):
            return
        if not fits:
            self._most_bytes = math.inf
        if self._model.num_orders > 1 or not self._is_alike(cycle):
            peak_bytes = max(peak_bytes, best.peak_bytes)
        self.plan = dataclasses.replace(best, peak_bytes=peak_bytes)
        self._run(self.plan)
        self.stage = "settled"
        if fits:
            self._begin_trials()
        elif self._infeasible_error is None:
            if devices.counting(cycle.device) is None:  # no later cycle shows it
                self._warn_of_excess(peak_bytes)
        else:
            self.refused = str(self._infeasible_error)
            self._infeasible.warn(self._infeasible_error, is_late=True)

    def _exceeds(self, risen_bytes: float) -> bool:
        """Return whether to correct the plan after a settled cycle with this peak. Warns once if that did not help."""
        assert self.plan is not None
        known_bytes = (1 + _TOLERANCE) * self.plan.peak_bytes if self.refused else self.plan.budget_bytes
        if risen_bytes <= known_bytes:
            return False
        self._num_excesses += 1
        if self._num_excesses == _MOST_EXCESSES + 1:
            self._warn_of_excess(risen_bytes)
        return self._num_excesses <= _MOST_EXCESSES

    def _warn_of_excess(self, peak_bytes: float) -> None:
        self._infeasible.warn_of_excess(type(self._module).__name__, self._config.text, peak_bytes)

    def _stop_offloading(self) -> bool:
        """Stop offloading: something else may hold what it should have freed. Return whether a plan offloaded."""
        if self._model is None or not self._solving.unlink(self._model):
            return False
        self._attempts, self._is_solved = [], False
        return True

    def _solve_again(self, cycle: Cycle) -> bool:
        """Correct the model by a cycle; return whether that leads to another plan."""
        assert self._model is not None and self.plan is not None
        needed = needs(self._solving.costs(self._model, cycle.static_bytes), self.plan)
        self._model.observe(cycle, self.plan, needed)
        self._solve(cycle.static_bytes)
        known = [(other.actions, other.rerun) for other, _ in self._attempts]
        return self.plan is not None and (self.plan.actions, self.plan.rerun) not in known

    def _leave_room(self, cycle: Cycle, peak_bytes: float) -> bool:
        """Solve for as much less as the best plan exceeded the budget; return whether that leads to another plan."""
        if len(self._attempts) > _MOST_ROUNDS + _MOST_LOWER_LIMITS or self._infeasible_error is not None:
            return False
        self._most_bytes = self._limit_bytes - (peak_bytes - self._budget_bytes)
        return self._solve_again(cycle)

    def _begin_trials(self) -> None:
        assert self.plan is not None and self._model is not None
        if any(self.plan.rerun) or any(map(BlockClass.is_recorded, self.plan.costs.blocks, self.plan.actions)):
            placed = functools.partial(self._solving.placed, self._model)
            self._trials = trials_of(self.plan, self._limit_bytes, placed, self._config)
            self.stage = "settled" if self._trials is None else "try"

    def _tried(self, cycle: Cycle) -> None:
        assert self._trials is not None and self._model is not None
        candidate = self._trials.running
        if cycle.meter is None:
            self._trials.note_time(cycle.began, cycle.device)
        elif candidate.probe is None:
            self._trials.note_peak(cycle.peak_bytes)
        elif not self._is_alike(cycle):
            self._trials.note_probe(candidate.peak_bytes)
        else:
            costs = self._solving.costs(self._model, cycle.static_bytes)
            self._trials.note_probe(self._model.peak_by_probe(cycle, costs, candidate.probe, candidate.plan))
        if self._trials.is_over:
            self.plan, self._trials, self.stage = self._trials.result(), None, "settled"
            self._run(self.plan)

    def _run(self, plan: Plan) -> None:
        """Run a plan in the next cycles: each forward its part of it."""
        assert self._model is not None and plan.blocks is not None and plan.places is not None
        self._has_run = True
        if plan is self.running_plan:
            return
        self.running_plan = plan
        for forward in self._forwards.values():  # its first cycle is metered, so this slows down no trial
            forward.group.record_first_step(plan)
        forwards = [[] for _ in self._forward_keys]  # type: list[list[int]]
        for at, call in enumerate(self._model.calls):
            forwards[call.forward].append(at)
        self._settings = [settings_of(plan, self._module, own, self._model.idle) for own in forwards]

    def _is_changed(self, static_bytes: float) -> bool:
        """Return whether the static bytes, or the budget, differ from those that the plan was made for."""
        if self.plan is None or self._model is None:
            return False
        if self._config.is_what_is_free and self.stage == "settled" and self._num_cycles % _CYCLES_PER_LOOK == 0:
            more = self._solving.budget_bytes(self._model, self.plan.costs) / self._budget_bytes - 1
            if more < -_CHANGE_OF_BUDGET or (more > _CHANGE_OF_BUDGET and self.plan.overhead_seconds > 0.0):
                return True
        if static_bytes > (1 + _CHANGE) * self._static_bytes:
            return True
        # Memory that comes and goes from cycle to cycle counts as present; a plan with more room can wait.
        self._num_less = self._num_less + 1 if static_bytes < (1 - _CHANGE) * self._static_bytes else 0
        return self._num_less >= _CYCLES_PER_LOOK and self.plan.overhead_seconds > 0.0
