"""The costs of one block: its values, bytes and seconds, measured at a call of the block in a real step.

The call itself is recorded (`structure`) under a policy that recomputes all it can. So a step in which all blocks are
profiled needs little more memory than one in which all are checkpointed.

Then the first block of each structure (operators, shapes, dtypes, gradient flow) runs forward and backward a few more
times in isolation: on detached inputs, aliases of its parameters and copies of its buffers. So no gradient, no
parameter hook and no other block is touched. Backward goes only to those inputs and parameters. It also goes to the
input of a model's first block if that changes nothing else: the block then shares the profile of later ones. Containers
are as the forward found them (NOTE [ Inputs of a region ]). Afterwards random state, module attributes, and the
containers and objects reachable from these and the arguments are restored. Other tensors that the recorded call wrote
to in place get their bytes back. These runs do not communicate with other ranks (NOTE [ Fake collectives ]), and
`actckpt.stats` does not count them. For sizes up to four times larger or smaller the block does not run again. Its
bytes are those of the recorded call; its seconds and peaks are scaled (`profiled_block`).

Time. The same runs are timed in a region that recomputes all it can. The extra time of forward is the cost of
recording. The extra time of backward is the cost of replaying; it is distributed over the values in proportion to their
operators' times. Reruns are timed as in `timing`. Modes that watch the step are removed (NOTE [ Modes ]): a mode takes
longer than small operators.

Memory. What the block holds for backward beyond the known values (results of opaque kernels) is one value that always
stays. Replays make operands that backward does not read, while gradients and kept values exist. That is more at once
than a block needs that keeps everything. So the peak of a run that drops everything counts if anything is dropped. The
peak of a rerun, which runs while the gradient of the output exists, counts if the block is rerun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from actckpt._blocks.arguments import first_tensor, others
from actckpt._blocks.key_value_caches import without_cache
from actckpt._blocks.reruns import checkpoint_around
from actckpt._budget.block_bytes import HeldBytes, block_peaks, held_bytes
from actckpt._budget.block_calls import BlockCall, block_times
from actckpt._budget.compiled_blocks import is_compiled, run_compiled
from actckpt._budget.fake_collectives import check_units, check_wrapped
from actckpt._budget.isolated_block import attributes_of, counts_calls, holds_input
from actckpt._budget.profiled_block import OTHER, BlockProfile, Cast, ProfiledBlock, at_other_size, without_sizes
from actckpt._budget.rng_usage import RngUsage
from actckpt._budget.structure import BlockStructure, held_elsewhere, operator_seconds, run_recorded
from actckpt._core import modes, rescue
from actckpt._core.storages import storages_of, tensors_in
from actckpt._rerun.held_call import ProfiledCall
from actckpt._text.places import Place
from actckpt.action import Action
from actckpt.errors import BlocksError
from actckpt.planner.costs import BLOCK_INPUT, BlockClass, Value
from actckpt.statistics import uncounted

__all__ = ["Profiler"]

#: Number of runs, of which the least seconds of an operator count.
_OPERATORS_TIMED = 3
_COUNTS_CALLS = "it changes its attributes at each call"


class Profiler:
    """Profiles blocks when they are called, each structure once.

    Args:
        offloads: whether plans may offload.
        step: a context around the run of each call that is part of the step.
    """

    def __init__(self, *, offloads: bool, step: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        self._offloads = offloads
        #: The name of the block that runs; empty: none.
        self.running = ""
        #: By structure without sizes: measured profiles, and whether a first block has that of later ones.
        self._measured: defaultdict[tuple[Any, ...], list[BlockProfile]] = defaultdict(list)
        self._in_stack: dict[tuple[Any, ...], bool] = {}
        self._step = step

    def call(
        self,
        name: str,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        failed: Callable[[str], None] | None = None,
    ) -> tuple[Any, ProfiledBlock | None]:
        """Call a block; return its result and its costs, None if only a later call can show them.

        Args:
            name: the block's qualified name.
            forward: the forward of the block.
            failed: gets the name if the block runs but cannot be profiled; None: that raises a BlocksError.
        """
        if failed is not None and (self.running or checkpoint_around() is not None):
            failed(name)
            return forward(*args, **kwargs), None
        check_wrapped(name, block)
        args, kwargs = without_cache(block, forward, args, kwargs) or (args, kwargs)
        with self._only_block(name):
            result, profiled = self._call(name, block, forward, args, kwargs)
            try:
                return result, profiled()
            except Exception:
                if failed is None:
                    raise
                failed(name)
                return result, None

    @contextlib.contextmanager
    def _only_block(self, name: str) -> Iterator[None]:
        if checkpoint_around() is not None:
            raise BlocksError(
                f"block {name!r} runs inside of a checkpoint, which runs it again in backward, and cannot be profiled "
                "there. Leave out that checkpoint, since the plan says what is recomputed, or pass other blocks=."
            )
        if self.running:
            raise BlocksError(
                f"block {name!r} runs inside of block {self.running!r}: a plan is for blocks one after another. Pass "
                "blocks=, of which none runs in another one."
            )
        self.running = name
        try:
            yield
        finally:
            self.running = ""

    def _call(
        self,
        name: str,
        block: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Callable[[], ProfiledBlock | None]]:
        """Call a block; return its result, and a function that returns its costs."""
        inputs = ProfiledCall(forward, args, kwargs)
        before, rng_used, argument = attributes_of(block), RngUsage(), first_tensor((args, kwargs))
        run = run_compiled if is_compiled(block) else run_recorded
        with self._step():
            result, structure = run(forward, args, kwargs, argument, offloads=self._offloads)
        drawn = rng_used.unrestored(block, structure.generators.values())
        inputs.forward_done()

        def costs() -> ProfiledBlock | None:
            if structure.is_measured_later:
                return None
            check_units(name, structure.exchanges)
            call = BlockCall(name, block, forward, (args, kwargs), structure)
            _note_held(call, result, inputs)
            no_rerun = drawn or (_COUNTS_CALLS if counts_calls(block, before, structure.written) else None)
            return self._costs(call, result, inputs, drawn, no_rerun)

        return result, costs

    def _costs(
        self, call: BlockCall, result: Any, inputs: Any, drawn: str | None, no_rerun: str | None
    ) -> ProfiledBlock:
        name, block, recorded = call.name, call.block, call.structure.values()
        places = {value.name: _without(value.name, name) for value in recorded}
        values = tuple(_renamed(value, places) for value in recorded)
        as_found, key = inputs.as_found, _structure_key(block, without_sizes(values))
        call = call.in_stack(result, as_found, self._in_stack, key)
        if not any(tensor.requires_grad for tensor in tensors_in(result)):  # frozen, and its input needs no gradient
            values = (dataclasses.replace(values[0], nbytes=0.0), *values[1:])

        def profiled() -> BlockProfile:
            with as_found(), _explained(name):
                return _profiled(call, values, no_rerun=no_rerun)

        profile = self._known_or(profiled, block, values, drawn, _passes_on(call.arguments))
        return _profiled_block(call, profile, places, result)

    def _known_or(
        self, profiled: Callable[[], BlockProfile], block: torch.nn.Module, values: tuple[Value, ...], *others: Any
    ) -> BlockProfile:
        """Return the profile of calls with these values, at this size or scaled from another one; else profile."""
        measured = self._measured[_structure_key(block, without_sizes(values), *others)]
        profile = at_other_size(measured, values)
        if profile is None:
            profile = profiled()
            measured.append(profile)
        return profile


def _profiled_block(call: BlockCall, profile: BlockProfile, places: dict[str, str], result: Any) -> ProfiledBlock:
    """Return the costs of a call.

    Args:
        places: names of values in the cost table by those in the model.
        result: of the call.
    """
    name, structure = call.name, call.structure
    costs, peaks = profile
    return ProfiledBlock(
        costs,
        {short: place for place, short in places.items() if short != BLOCK_INPUT},
        peaks,
        input=structure.input,
        input_bytes=structure.input_bytes,
        returned={places[value]: storage for value, storage in structure.returned(result).items()},
        casts=tuple(Cast(storage, nbytes, _without(value, name)) for storage, nbytes, value in structure.casts()),
        made={places[value]: storage for value, storage in structure.storages().items() if value in places},
        arguments=_with_bytes(call.arguments),
        results=tuple(storage for storage, _ in _with_bytes(result)),
    )


def _structure_key(block: torch.nn.Module, values: Iterable[Value], *others: Any) -> tuple[Any, ...]:
    # Times differ from call to call and are not part of the structure.
    same = (dataclasses.replace(value, recompute_s=0.0) for value in values)
    trained = ((parameter.shape, parameter.requires_grad) for parameter in block.parameters())
    return (type(block), block.training, *others, *same, *trained)


def _with_bytes(arguments: Any) -> tuple[tuple[weakref.ref[torch.UntypedStorage], int], ...]:
    return tuple((weakref.ref(storage), storage.nbytes()) for storage in storages_of(list(tensors_in(arguments))))


def _note_held(call: BlockCall, result: Any, inputs: Any) -> None:
    """Record which dropped values are held by something other than the recorder."""
    alive = call.structure.note_alive(result)
    if alive:
        with inputs.as_found(), _explained(call.name):
            alive = _held_elsewhere(call)
    call.structure.note_held(alive)


def _passes_on(arguments: Any) -> bool:
    """Return whether a block computes only the gradient of its input; the other gradients count as accumulating."""
    argument = first_tensor(arguments)
    return argument is not None and argument.requires_grad and not any(o.requires_grad for o in others(arguments))


def _renamed(value: Value, names: dict[str, str]) -> Value:
    inputs = tuple(names.get(name, name) for name in value.inputs)
    return dataclasses.replace(value, name=names.get(value.name, value.name), inputs=inputs)


def _without(place: str, block: str) -> str:
    """Return a place without the block's name, so that equal blocks have equal places."""
    if place.startswith(f"{block}."):
        return place[len(block) + 1 :]
    return place[len(block) :] if place.startswith(f"{block}::") else place


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if rescue.is_out_of_memory(error):
            raise
        raise BlocksError(
            f"block {name!r} ran in the step, but not once more on its own, to be profiled: {type(error).__name__}: "
            f"{error}. Pass other blocks=, or a policy in place of a budget."
        ) from error


@uncounted()
def _profiled(call: BlockCall, values: tuple[Value, ...], *, no_rerun: str | None) -> BlockProfile:
    """Return the costs of a block.

    Args:
        no_rerun: why the block must not be rerun; None: no known reason.
    """
    structure, held = call.structure, held_bytes(call)
    argument_storages = storages_of(list(tensors_in(call.arguments)))
    writes_to_input = any(id(storage) in structure.written for storage in argument_storages)
    with modes.without_own():
        no_rerun = no_rerun or _why_no_rerun(structure, writes_to_input=writes_to_input)
        times, no_rerun = block_times(call, values, no_rerun)
        values = _timed_again(call, values)
        peaks = block_peaks(call, can_rerun=no_rerun is None)
    values = tuple(dataclasses.replace(value, offload_s=times.offload_s * value.offloadable) for value in values)
    if not writes_to_input and structure.bytes_held() == 0 and not _holds_input(call):
        values = (dataclasses.replace(values[0], needed=False), *values[1:])
    costs = BlockClass(
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        working_set_bytes=0.0,  # in `BlockPeaks`
        recording_s=max(times.recorded_s - times.forward_s, 0.0),
        values=(
            *_scaled(values, times.forward_s, times.replaying_s - times.backward_s),
            Value(OTHER, _other_bytes(structure, held), offloadable=False, replayable=False),
        ),
        rerun=no_rerun is None,
        rerun_s=times.rerun_s,
        no_rerun=no_rerun,
    )
    return BlockProfile(costs, peaks)


def _other_bytes(structure: BlockStructure, held: HeldBytes) -> float:
    """Return the bytes that a block holds beyond its values."""
    cached_bytes = max(held.cast_bytes - structure.saved_cast_bytes(), 0)  # held by others, or by an earlier call
    return float(max(held.nbytes - cached_bytes - structure.saved_bytes() - structure.bytes_held(), 0))


def _why_no_rerun(structure: BlockStructure, *, writes_to_input: bool) -> str | None:
    if structure.has_opaque():
        return "it makes what configure(opaque=...) names"
    if writes_to_input:  # a rerun would read what it wrote
        return "it writes to its input"
    if structure.holds_twice_in_rerun():
        return "something else holds what it makes, and would hold what a rerun makes, too"
    return "it runs collectives" if structure.exchanges.integers else None


def _timed_again(call: BlockCall, values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return values with the least measured seconds of their operators: outliers would mislead the solver."""
    for _ in range(_OPERATORS_TIMED):
        with call.isolate() as run:
            times = operator_seconds(run.forward, run.args, run.kwargs)
        seconds = {_without(place, call.name): value for place, value in times.items()}
        values = tuple(
            dataclasses.replace(value, recompute_s=min(value.recompute_s, seconds.get(value.name, value.recompute_s)))
            for value in values
        )
    return values


@uncounted()
def _held_elsewhere(call: BlockCall) -> frozenset[Place]:
    with call.isolate() as run:
        return held_elsewhere(run.forward, run.args, run.kwargs)


def _scaled(values: tuple[Value, ...], forward_s: float, replayed_s: float) -> tuple[Value, ...]:
    """Return values whose seconds are those of replays.

    Args:
        values: with the seconds of operators, each timed separately.
        forward_s: of the block. Timing slows operators down: all of them together take at most this.
        replayed_s: time of the block to restore all that it can.
    """
    block = BlockClass(0.0, 0.0, 0.0, values=values)
    dropped = {value.name: Action.RECOMPUTE if value.replayable else Action.KEEP for value in values}
    timed = sum(value.recompute_s for value in block.recomputed(dropped))
    if timed > 0.0 and replayed_s > 0.0:
        factor = replayed_s / timed
    else:
        everything = sum(value.recompute_s for value in values)
        factor = min(1.0, forward_s / everything) if everything else 1.0
    return tuple(dataclasses.replace(value, recompute_s=factor * value.recompute_s) for value in values)


def _holds_input(call: BlockCall) -> bool:
    with call.isolate() as run:
        return holds_input(run.forward, run.args, run.kwargs)
