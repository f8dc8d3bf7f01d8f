"""Execute recorded steps again, from values at hand to the one that backward asks for."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actckpt import _C
from actckpt._core import numerics, random_state, torch_private
from actckpt._core.counters import counters
from actckpt._core.messages import parameter_name
from actckpt._core.watched import version_of
from actckpt._replay import schedule
from actckpt._replay.aliases import Watched, changed_error
from actckpt._replay.geometry import Geometry
from actckpt._replay.lineage import Step, Value, Window
from actckpt._replay.paused import Paused
from actckpt._replay.tape import Tape
from actckpt._replay.wrappers import Witness
from actckpt.errors import ActckptError, SavedTensorChangedError

__all__ = ["bytes_of", "changed_error", "on", "replay", "watch_roots"]


#: Held while a replayed operator runs under settings of its own: two threads must not put back each other's.
_lock = threading.RLock()


def on(base: Tensor, window: Window | Geometry) -> Tensor:
    """Return the tensor that `window` describes, on the storage of `base`. Call it paused."""
    dtype, shape, stride, offset = window.dtype, window.shape, window.stride, window.offset
    is_conj, is_neg = window.is_conj, window.is_neg
    if base.dtype is dtype and not (is_conj or is_neg or base.is_neg() or base.is_conj()):
        return base.as_strided(shape, stride, offset)
    tensor = torch.empty(0, dtype=dtype, device=base.device)
    tensor.set_(base.untyped_storage(), offset, shape, stride)
    if is_conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if is_neg else tensor


def bytes_of(tape: Tape, value: Value, window: Window | None = None, clock: int = 0) -> Tensor:
    """Return a tensor on the storage of `value`, replayed if need be.

    Args:
        window: what is needed of its bytes; None: all.
        clock: when the saved tensor that asks for them was saved; 0: not known.
    """
    held, cached, stored = value.held, value.cached, value.stored  # another backward may let go of what is cached
    if held is not None:
        if not tape.is_open:
            _check_unchanged(value, held)
        check_size(held, value.nbytes, _what(value))
        return held
    if cached is not None:
        if version_of(cached) == value.cached_version:
            return cached
        if value.step is None:
            raise changed_error(cached.shape, cached.dtype, version_of(cached), value.cached_version)
        _C.uncache(value)  # backward changed what it had unpacked
    if stored is None:
        return replay(tape, value, clock)
    if isinstance(stored, Watched):
        return stored() if window is None else stored.under(window)
    tensor = stored()
    task = torch_private.current_graph_task_id()
    _C.count_needs(tape, task)
    if tape.outer is None and tape.has_room() and _C.is_asked(value, task):
        _C.cache(tape, value, tensor, task)  # who is replayed from it need not have it brought back once more
    return tensor


def _check_unchanged(value: Value, held: Tensor) -> None:
    """Raise if held bytes changed after the region closed (Rule 7)."""
    if version_of(held) != value.version:
        raise changed_error(held.shape, held.dtype, version_of(held), value.version)


def _what(value: Value) -> str:
    return "a parameter" if value.is_parameter else "an input" if value.is_input else "a tensor made in the region"


def check_size(held: Tensor, nbytes: int, what: str) -> None:
    """Raise if a storage that we do not own is not what it was (Rule 8)."""
    found = held.untyped_storage().nbytes()
    if found != nbytes:
        name = parameter_name(held)
        raise SavedTensorChangedError(
            f"Backward needs {f'the parameter {name}' if name else what} of shape {tuple(held.shape)}, {held.dtype}, "
            f"whose storage was freed or resized after the forward: it has {found} bytes now; "
            f"{nbytes} were recorded.\nFSDP2 frees the parameters of a unit after its forward. Put the region "
            "inside each unit, as actckpt.apply(model, policy=...) before fully_shard does, not around several."
        )


def watch_roots(tape: Tape, made_of: Mapping[Value, Sequence[Witness]]) -> None:
    """Watch the values of a closed tape through every tensor that they were seen through (Rule 7).

    Args:
        tape: what it holds is settled.
        made_of: tensors that are made of values.
    """
    seen = {} if tape.roots is None else dict(tape.roots)
    for value in {**seen, **made_of}:
        is_watched = value in made_of or not value.is_parameter
        if not is_watched or tape.outer is not None or (value.held is None and value.stored is None):
            continue
        last = value.held if value.held is not None or value.root is None else value.root()
        roots = [
            (root, version)
            for root, version in ((other(), version) for other, version in seen.get(value, ()))
            if root is not None
        ]
        if last is not None and value.version >= 0:
            roots.append((last, value.version))
        held = value.held
        get = value.stored if held is None else partial(_sized, held, value.nbytes, _what(value))
        assert get is not None
        value.stored, value.held = Watched(get, roots, made_of.get(value, ())), None
    tape.roots = None


def _sized(held: Tensor, nbytes: int, what: str) -> Tensor:
    check_size(held, nbytes, what)
    return held


def replay(tape: Tape, target: Value, clock: int) -> Tensor:
    """Return a tensor on the storage of `target`, made by executing the steps that lead to it.

    Values on the way that this backward asks for again stay with it (Rule 12 of NOTE [ Replay ]).
    """
    step = target.step
    if step is None:
        if target.is_at_hand():  # another backward has just replayed it
            return bytes_of(tape, target)
        raise _lost(target)
    task = torch_private.current_graph_task_id()
    _C.count_needs(tape, task)
    return _Run(tape, target, task, *schedule.order(tape, target, task, clock)).result()


class _Run:
    """One replay: steps in order, and what they made that is needed still."""

    def __init__(self, tape: Tape, target: Value, task: int, steps: list[Step], retained: set[Value]) -> None:
        self._tape = tape
        self._target = target
        self._task = task
        self._steps = steps
        #: What stays for later in this backward.
        self._retained = retained
        self._made: dict[Value, Tensor] = {}
        self._uses = Counter(value for step in steps for value in set(step.inputs))

    def result(self) -> Tensor:
        for step in self._steps:
            self._execute(step)
            for value in set(step.inputs):
                self._uses[value] -= 1
                if not self._uses[value] and value is not self._target:
                    self._made.pop(value, None)
        counters.add("replayed_operators", len(self._steps))
        return self._made[self._target]

    def _execute(self, step: Step) -> None:
        bases: dict[Value, Tensor] = {}
        for value in step.inputs:
            if value not in bases:
                found = self._made.get(value)
                bases[value] = found if found is not None else bytes_of(self._tape, value)
        # Natively, since what a signal handler cuts short here would go on for the rest of the thread (Rule 9).
        with Paused(), torch_private.below_autograd(), _settings_of(step):
            for value in step.written:
                bases[value] = self._private(value, bases.get(value))
            args = [_thawed(arg, bases) for arg in step.args]
            kwargs = {name: _thawed(arg, bases) for name, arg in step.kwargs.items()} if step.kwargs else {}
            result = _called(step, args, kwargs)
        flat = _flat(result)
        for reference, (kind, index) in zip(step.outputs, step.results, strict=True):
            made = reference()
            if made is not None:
                self._keep(made, bases[step.written[index]] if kind else flat[index])

    def _private(self, value: Value, base: Tensor | None) -> Tensor:
        """Return memory with the bytes of `value` that a step may write to (Rule 1)."""
        memory = torch.empty(0, dtype=torch.uint8, device=value.device)
        if base is None:  # all of it will be overwritten
            return memory.set_(torch.empty(value.nbytes, dtype=torch.uint8, device=value.device).untyped_storage())
        is_alone = value not in self._retained and value is not self._target
        if is_alone and value in self._made and self._uses[value] == 1:
            return self._made.pop(value)
        return memory.set_(base.untyped_storage().clone())

    def _keep(self, value: Value, tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes() != value.nbytes:
            raise ActckptError(
                f"Replay made other bytes than the forward: a result of {value.step.operator.name} "  # type: ignore[union-attr]
                f"has {tensor.untyped_storage().nbytes()} bytes, and {value.nbytes} were recorded.\nDoes the "
                "operator depend on a global setting that changed? Keep what it makes: add it to "
                "actckpt.configure(opaque=[...])."
            )
        if self._tape.meter is not None:
            self._tape.meter.note(tensor.untyped_storage())
        if value.entry is not None:
            value.entry.num_replays += 1
        if value is self._target or self._uses[value]:
            self._made[value] = tensor
        if value in self._retained and not value.is_at_hand():
            _C.cache(self._tape, value, tensor, self._task)


def _thawed(arg: Any, bases: dict[Value, Tensor]) -> Any:
    if type(arg) is Window:
        return on(bases[arg.value], arg)
    return [_thawed(item, bases) for item in arg] if type(arg) is list else arg


def _flat(result: Any) -> list[Any]:
    if not isinstance(result, (list, tuple)):
        return [result]
    return [tensor for item in result for tensor in (item if isinstance(item, (list, tuple)) else (item,))]


def _called(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the operator of a step in the grad mode of its forward; no argument requires grad."""
    if not step.grad_enabled:
        return _called_with_random_state(step, args, kwargs)
    torch_private.set_grad_enabled(True)
    try:
        return _called_with_random_state(step, args, kwargs)
    finally:
        torch_private.set_grad_enabled(False)


def _called_with_random_state(step: Step, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call the operator of a step with the random state of its forward (Rule 3)."""
    func, random = step.operator.func, step.random
    if random is None:
        return func(*args, **kwargs)
    if isinstance(random, tuple):
        device, state = random
        generator = torch.Generator(device)
        generator.set_state(state)
        if not any(isinstance(arg, torch.Generator) for arg in (*args, *kwargs.values())):
            return func(*args, **kwargs | {step.operator.generator_name: generator})
        args = [generator if isinstance(arg, torch.Generator) else arg for arg in args]
        return func(*args, **{k: generator if isinstance(v, torch.Generator) else v for k, v in kwargs.items()})
    with random_state.swapped_in(random):
        return func(*args, **kwargs)


@contextmanager
def _settings_of(step: Step) -> Iterator[None]:
    """Run the body without autocast and function modes, under settings of old (Rule 9)."""
    with ExitStack() as stack:
        if torch_private.any_autocast_enabled():
            stack.enter_context(torch.autocast("cpu", enabled=False))
            if torch.accelerator.is_available():
                stack.enter_context(torch.autocast(torch.accelerator.current_accelerator().type, enabled=False))  # type: ignore[union-attr]
        if torch_private.num_function_modes():
            stack.enter_context(torch_private.replaced_function_modes(()))
        if not _C.are_numerics(step.numerics):
            stack.enter_context(_lock)
            stack.enter_context(numerics.restored(step.numerics))
        yield


def _lost(value: Value) -> ActckptError:
    return ActckptError(
        f"A saved tensor of {value.nbytes} bytes cannot be brought back: {value.why_opaque or 'its bytes are gone'}, "
        "and no recorded operator makes it.\nSomething that was not recorded (a compiled function, a raw kernel) "
        "changed a tensor inside the region. Keep what is made from it, change a clone, or use actckpt.checkpoint, "
        "which runs the function again."
    )
