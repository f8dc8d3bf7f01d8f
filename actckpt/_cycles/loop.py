"""The loop behind `apply(budget=...)`: measure a cycle, solve, run, correct, try candidates, settle.

1. A cycle starts at a forward of the model with gradients while no other one is alive, and ends when none is alive any
   more. A forward is alive until a backward releases its graph, or the program drops it. Forwards without gradients
   (evaluation, generation) are not part of a cycle.
2. Cycles of one kind (shapes, dtypes, flags, mode, autocast, trained parameters, whether earlier micro-batches count)
   share a plan. The first cycle of a kind is *measured*: every block drops all that it can and is profiled, and a meter
   records the peak of each segment (`timeline`). Compiled blocks run once before they are measured. Large modules
   outside of the blocks become blocks, and the kind is measured again (`added_blocks`).
3. The next cycle solves for the budget and runs the plan under a meter. The observed peaks correct the model. The loop
   solves again, at most three times, if the budget is exceeded, or if more than 2 % of it is unused while values are
   dropped. The fastest plan that fits is kept (stage *fit*).
4. Then candidate plans run in turn (stage *try*), and the fastest one is kept (stage *settled*).
5. What a plan does not cover is recomputed: block calls that did not run, did nothing, or were smaller in the measured
   cycle. The kind is then measured again.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from actckpt._blocks.applied import CheckpointedForward, Settings
from actckpt._blocks.outside import OutsideModules
from actckpt._blocks.planned_size import PlannedSize, given_bytes
from actckpt._blocks.reruns import checkpoint_around
from actckpt._budget.bandwidth import is_linked, poll
from actckpt._budget.budget_config import BudgetConfig
from actckpt._budget.running import RECOMPUTE, device_of, use_settings
from actckpt._core import devices, torch_private
from actckpt._core.memory_by_module import explain
from actckpt._core.sites import warn_user
from actckpt._core.storages import tensors_in
from actckpt._core.warning_texts import WarningText
from actckpt._cycles import warnings as texts
from actckpt._cycles.added_blocks import AddedBlocks
from actckpt._cycles.allocator_meter import RisenPeak, free_older
from actckpt._cycles.forward_life import ForwardLife
from actckpt._cycles.kinds import Kind
from actckpt._cycles.known_kinds import CycleKey, CycleKeys, ForwardKey, KnownKinds
from actckpt._cycles.leftovers import Leftovers
from actckpt._cycles.meter import meter_of, sweep
from actckpt._cycles.metered_calls import MeteredCalls
from actckpt._cycles.timeline import Cycle
from actckpt._text.listed import listed
from actckpt.errors import BlocksError
from actckpt.planner.plans import Plan

__all__ = ["BudgetLoop"]

#: Maximum number of forwards of a cycle without backward while others had theirs; beyond, the oldest are given up.
_MOST_FORWARDS = 16
#: Number of successive forwards without any backward that triggers a warning.
_MOST_UNREAD = 16


def _ran_larger(training: BudgetLoop | None, *_: object) -> None:
    if training is not None:  # else the block was copied without its model
        training.ran_larger()


class BudgetLoop:
    """The blocks of a model under a budget."""

    def __init__(self, model: torch.nn.Module, forwards: dict[str, CheckpointedForward], config: BudgetConfig) -> None:
        self._model, self._forwards, self._config = model, forwards, config
        self._start()
        self.open()

    def open(self) -> None:
        """Watch the model, again after `close`."""
        begin = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._hooks = [begin, self._model.register_forward_hook(self._end, always_call=True)]

    def _start(self) -> None:
        self._infeasible = texts.Infeasible(self._config.on_infeasible)
        self._kinds = KnownKinds(self._new_kind)
        self._keys, self._leftovers = CycleKeys(self._model), Leftovers(self._config, self._model)
        self._kind: Kind | None = None
        self._key: CycleKey | None = None
        #: The cycle runs the plan of a larger one.
        self._is_smaller = False
        self._cycle: Cycle | None = None
        #: Live forwards of the cycle; `_epoch` identifies forwards of cycles that were given up.
        self._num_alive = self._epoch = 0
        #: Per thread, the running forwards: the cycle of each, None if it is not part of one.
        self._running: defaultdict[int, list[Cycle | None]] = defaultdict(list)
        self._added = AddedBlocks(self._model, self._forwards, is_on=self._config.adds_blocks)
        self._calls = MeteredCalls(
            is_inside=lambda: bool(self._running[threading.get_ident()]),
            offloads=lambda: is_linked(self._device, self._config.pins),
            added=self._added,
        )
        self._warned: set[WarningText] = set()
        self._outside: OutsideModules | None = None
        self._num_unread = self.num_forwards = 0
        #: Number of calls of each block.
        self.num_calls = Counter[str]()
        #: Number of second attempts of each block.
        self._num_rescued = Counter[str]()
        self._size: PlannedSize | None = None
        #: Whether a forward with gradients has started.
        self.is_called = False

    def _new_kind(self) -> Kind:
        return Kind(self._model, self._forwards, self._config, self._infeasible, self._kinds.all)

    @property
    def _device(self) -> torch.device:
        return device_of(self._model)

    def __getstate__(self) -> dict[str, Any]:
        # A copy measures anew: its parameters, and so all measurements, differ.
        config = self._config.without_optimizers()
        return {"_model": self._model, "_forwards": self._forwards, "_hooks": self._hooks, "_config": config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for forward in self._forwards.values():  # a copied block does not copy this object, and so the model, along
            forward.group.training = self
        self._start()

    @property
    def plan(self) -> Plan | None:
        """The plan of the last kind of cycle, None until it is made."""
        return None if self._kind is None else self._kind.plan

    @property
    def running_plan(self) -> Plan | None:
        return None if self._kind is None else self._kind.running_plan

    @property
    def refused(self) -> str:
        """Why the plan of the last kind of cycle exceeds the budget, or why there is none; else empty."""
        return "" if self._kind is None else self._kind.refused

    @property
    def rescued(self) -> str:
        """Which forwards of blocks ran out of memory, and what was done; empty: none."""
        each = [f"{name} ({number})" if number > 1 else name for name, number in self._num_rescued.items()]
        return (
            f"Ran out of memory in forward, and ran once more: {listed(each)}. Later plans need less." if each else ""
        )

    @property
    def race_steps_left(self) -> int:
        """The maximum number of trials left for the last kind of cycle."""
        return 0 if self._kind is None else self._kind.num_trials_left

    @property
    def model_name(self) -> str:
        return type(self._model).__name__

    @property
    def is_measured(self) -> bool:
        return self._kind is not None and self._kind.stage != "measure"

    @property
    def is_settled(self) -> bool:
        return self._kind is not None and self._kind.stage == "settled"

    def ran_unplanned(self, name: str) -> bool:
        """A block ran that the plan does not cover; return whether the kind is measured again."""
        if self._cycle is None or self._kind is None:
            return False
        self._cycle.is_void = True
        return not self._config.pins and self._measure_again()  # pins name calls by their number

    def _measure_again(self) -> bool:
        """The plan did not cover what ran; return whether a later cycle is measured."""
        if self._is_smaller and self._key is not None:
            self._kinds.separate(self._key)
            return True
        return self._kind is not None and self._kind.measure_again()

    def ran_larger(self) -> None:
        """A block got more bytes than when it was measured: the rest of the forward recomputes everything."""
        use_settings(self._forwards, {})
        if self._cycle is not None and self._kind is not None:
            self._cycle.is_void = True
            if not self._measure_again():
                self._warn(texts.GROWS)

    def ran_out_of_memory(self, name: str) -> None:
        """The forward of a block ran out of memory, and runs a second time.

        The rest of the forward recomputes everything, and the next cycle runs a plan with less memory.
        """
        self._num_rescued[name] += 1
        self._warn(texts.RAN_OUT, block=name)
        use_settings(self._forwards, {})
        if self._cycle is not None:
            self._cycle.is_void = True
            if self._kind is not None:
                self._kind.plan_with_less()

    def explain(self, error: RuntimeError) -> None:
        """Add a table of memory by module to the error of a block that ran out of memory."""
        explain(error, self._model, self._config.optimizers)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._give_up_cycle()
        sweep()

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled() and not torch.compiler.is_exporting():
                self._warn_of_compiled()
            return
        first = next(iter(self._forwards.values()))
        first.group.take_over_late(first)
        running = self._running[threading.get_ident()]
        self._forget_interrupted(running)
        running.append(None)
        if len(running) > 1:  # the model calls itself
            return
        sweep()
        if not torch.is_grad_enabled():
            return
        if torch_private.innermost_transform() is not None:  # tensors of torch.func have no bytes of their own
            use_settings(self._forwards, {})
            return
        if (captures := devices.is_capturing()) or checkpoint_around() is not None:
            raise BlocksError(texts.CAPTURED if captures else texts.CHECKPOINTED)
        if self._num_unread >= _MOST_UNREAD:
            self._warn(texts.UNREAD, forwards=_MOST_UNREAD)
        self.is_called = True
        cycle = self._cycle
        if cycle is not None and cycle.thread != threading.get_ident():
            if self._is_measuring():
                raise BlocksError(texts.TWO_THREADS)
            cycle.is_void = True
        if cycle is not None and cycle.num_forwards >= _MOST_FORWARDS and cycle.num_backwards:
            self._give_up_cycle()
        if self._cycle is None:
            self._begin_cycle(args, kwargs)
        running[-1] = self._cycle
        self._begin_forward(self._keys.forward(args, kwargs))

    def _begin_cycle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        accumulates = self._keys.has_gradients() and self._leftovers.count()
        if sum(forward.run_around_compiled() for forward in self._forwards.values()):
            self._kinds.forget()
        key = self._key = CycleKey(accumulates, self._keys.forward(args, kwargs))
        kind, self._is_smaller = self._kinds.find(key)
        self._kind = kind
        if kind is None:
            self._warn(texts.MANY_SIZES)
        poll(self._device)
        if kind is not None and kind.stage != "settled":
            free_older(self._device, collects_garbage=kind.begins_to_measure)
        static_bytes, held = self._config.static(self._model, self._device)
        static_bytes += self._leftovers.nbytes(kind, held, accumulates=accumulates)
        is_metered = kind is not None and kind.begin(static_bytes, is_smaller=self._is_smaller)  # may raise
        is_metered = kind is not None and self._leftovers.meters(is_metered, accumulates=accumulates)
        own, older = self._leftovers.not_counted(is_metered=is_metered)
        cycle = self._cycle = Cycle(self._device, static_bytes)  # first, since it ends the meter
        if is_metered:
            cycle.meter = meter_of(self._device, held, parameters=own, older=older)
        elif (allocator := devices.counting(self._device)) is not None:
            starts_again = kind is not None and kind.looks
            cycle.watch = RisenPeak(allocator, self._device, own, older, starts_again=starts_again)
        cycle.note("begin")
        self._calls.begin(cycle, kind)
        if self._is_measuring() and cycle.meter is not None:
            meter = cycle.meter
            self._outside = OutsideModules(self._model, self._forwards, lambda: meter.live_bytes)
        is_watched = cycle.meter is not None or (kind is not None and kind.outlives_outputs)
        for forward in self._forwards.values():
            forward.profiling_override = self._calls.call if is_watched else None

    def _begin_forward(self, key: ForwardKey) -> None:
        cycle, kind = self._cycle, self._kind
        assert cycle is not None
        number = cycle.forward_begins()
        self.num_forwards += 1
        self._num_alive += 1
        self._calls.life = ForwardLife(functools.partial(self._read, self._epoch))
        settings: Mapping[str, Settings] | None = None if kind is None else kind.settings(number, key)
        if settings is None:
            if not self._config.pins:
                self._measure_again()
            use_settings(self._forwards, dict.fromkeys(self._forwards, RECOMPUTE))
            cycle.is_void = cycle.is_void or not self._is_measuring()
        else:
            use_settings(self._forwards, settings)
            self._watch_sizes(number)

    def _watch_sizes(self, number: int) -> None:
        """Compare the bytes passed to blocks in a planned forward with the measured ones."""
        if self._kind is None or self._is_measuring():
            return
        self._size = PlannedSize(self._kind.given_bytes(number), given_bytes, _ran_larger)
        for forward in self._forwards.values():
            forward.planned_size = self._size

    def _is_measuring(self) -> bool:
        return self._cycle is not None and self._kind is not None and self._kind.is_measured_now

    def _end(self, _: torch.nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        running = self._running[threading.get_ident()]
        cycle = running.pop() if running else None  # none if an earlier hook failed
        if self._size is not None and not running:  # blocks may run outside of their model
            self._size.close()
            self._size = None
        if cycle is None or cycle is not self._cycle:
            return
        cycle.forward_ends()
        if cycle.meter is not None and self._is_measuring() and cycle.num_forwards == 1:
            self._end_outside(cycle)
        tensors = list(tensors_in(result))
        self._leftovers.returned(tensors)
        self._calls.returned(tensors)
        outputs = [tensor for tensor in tensors if tensor.grad_fn is not None]
        if outputs:
            self._follow(outputs)
            return
        self._calls.life = None
        cycle.is_void = True
        if cycle.calls and self._is_measuring() and sys.exc_info()[0] is None and self._calls.are_trained:
            self._warn(texts.NO_OUTPUTS)
        self._gone(self._epoch)

    def _follow(self, outputs: list[torch.Tensor]) -> None:
        """Detect which backwards reach a forward, and when its graph is freed."""
        cycle, life = self._cycle, self._calls.life
        assert cycle is not None and life is not None
        number = cycle.num_forwards - 1

        def reached(retains_graph: bool) -> None:
            cycle.backward_reaches(number, torch_private.current_graph_task_id(), retains_graph=retains_graph)
            self._calls.settle(cycle)

        life.ends(outputs, reached)
        self._calls.life = None

    def _read(self, epoch: int, is_read: bool) -> None:
        """The graph of a forward was freed; `is_read`: a backward reached its outputs."""
        self._num_unread = 0 if is_read else self._num_unread + 1
        self._gone(epoch)

    def _gone(self, epoch: int) -> None:
        """A forward of the cycle is no longer alive."""
        if epoch != self._epoch or self._cycle is None:
            return
        self._num_alive -= 1
        if self._num_alive == 0:
            cycle = self._cycle
            self.num_calls.update(call.block for call in cycle.calls)
            if not cycle.calls and cycle.num_backwards and not cycle.is_void and self._is_measuring():
                self._warn(texts.COMPILED)
            self._close_cycle()
            kind = self._kind
            if kind is not None and kind.is_measured_now and self._added.add(cycle):
                self._kinds.forget()
                self._kind = None
            elif kind is not None and not self._is_smaller:
                kind.end(cycle, self._calls.settled)
            elif kind is not None and not cycle.is_void and not kind.knows_order(cycle):
                self._measure_again()
            self._calls.begin()

    def _give_up_cycle(self) -> None:
        """Discard the cycle: its forwards were interrupted, or never get a backward."""
        self._close_cycle()
        self._calls.begin()

    def _end_outside(self, cycle: Cycle) -> None:
        """Record what modules outside of the blocks hold, and stop watching them."""
        if self._outside is not None:
            cycle.made_outside = self._outside.made()
            self._outside.close()
            self._outside = None

    def _close_cycle(self) -> None:
        cycle, self._cycle = self._cycle, None
        self._epoch += 1
        self._num_alive = 0
        if cycle is not None:
            self._end_outside(cycle)
            cycle.end()
            self._leftovers.add(cycle)
            for forward in self._forwards.values():
                forward.profiling_override = None
            if torch_private.current_graph_task_id() == -1:
                sweep()

    def _forget_interrupted(self, running: list[Cycle | None]) -> None:
        """Discard forwards of this thread that were interrupted: no hook ran at their end."""
        num_outer = max(torch_private.num_calls(self._model) - 1, 0) if running else 0
        current, ended = self._cycle, running[num_outer:]
        is_empty = current is not None and current.thread == threading.get_ident() and not self._num_alive
        if is_empty or any(cycle is not None and cycle is current for cycle in ended):
            self._give_up_cycle()
        del running[num_outer:]

    @torch_private.called_while_traced
    def _warn_of_compiled(self) -> bool:
        self._warn(texts.COMPILED)
        return True

    def _warn(self, text: WarningText, **values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn_user(text, model=self.model_name, **values)
