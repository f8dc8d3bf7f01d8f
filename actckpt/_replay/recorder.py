"""The recorder: records each operator of a region's forward once, as steps and values.

NOTE [ Replay ]

Each rule prevents silently wrong gradients.

Rule 1. Versions. An in-place operator makes a new value of a storage. Its replay works on a private copy while an older
value is still needed. A recorded operator may overwrite bytes that only the storage holds (inputs, kept, opaque). If a
saved value needs them, they are copied first (`copied_on_write_bytes`). A value made in place from a kept value
inherits its action.
Rule 2. Identity. Aliases are recognised by the identity of their storage under a weak reference. Schemas do not suffice
(`_unsafe_view` returns an undeclared alias), nor do addresses (they are reused).
Rule 3. Randomness. Generator states are captured before a random operator and used for its replay: in a private
generator if the operator takes one, else swapped in under the lock of NOTE [ Random state ]. An operator that is not
torch's own is random if it moved a default generator.
Rule 4. Opaque values. Bytes that no recorded operator made are never replayed:
- outputs of raw kernels and of compiled code;
- memory that no single recorded operator has filled (buffers of `torch.empty` filled piece by piece);
- storages that cannot be read (sparse, nested), and values made from them;
- values made from inference tensors, which have no version counter;
- values made below dispatch modes that may change results (NOTE [ Modes ]).
Rule 5. Effects. Collectives, operators with undeclared writes or registered effects, and nondeterministic operators
are not replayed, or only in a form without the effect. (On the CPU most are nondeterministic only with several
threads.) Collectives that a policy names are replayed: NOTE [ Repeated collectives ].
Rule 6. Changes after closing. If replay needs bytes that changed after the region closed, unpack raises. An external
storage must also have its recorded size. The aliases that count changes are made outside of the dispatch handler:
inside it, `detach()` does not share the version counter. State that the region itself writes in place (buffers of
`spectral_norm`, moving averages) changes again in its next call. Dropped values are replayed from a copy of such state,
made when the region closes.
Rule 7. Settings. Replay runs without grad mode and autocast, with every recorder paused. Each operator runs under the
settings of its forward (NOTE [ Settings ]). A tensor that unpack returns while the region is open keeps its identity as
a recorded value.
Rule 8. Compile. Operators inside compiled code are not recorded: kernels that no dispatcher sees write to the same
memory in between. What compiled code returns and saves is opaque. If that is a large part of a function, the function
reruns instead, from its next call on. Higher-order operators are not recorded either. Before torch 2.10, compiled code
runs uncompiled below any dispatch mode, and is recorded.
Rule 9. Nesting. A region inside another one, with no other hooks in between, records on the outer tape, with its own
policy. Otherwise, when it closes, it packs what it must hold into the outer hooks, in the order in which the values
were made: NOTE [ Outer hooks ].
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from actckpt import _C
from actckpt._C import add_results, add_value, with_windows
from actckpt._core import devices, random_state
from actckpt._core.observing_mode import ObservingMode
from actckpt._replay import collectives, saved_tensor_hooks
from actckpt._replay.geometry import covers_all
from actckpt._replay.lineage import Step, Value, Window, blank_of, is_unread, redirect
from actckpt._replay.named_operators import Matches
from actckpt._replay.operators import Operator
from actckpt._replay.tape import Tape
from actckpt.action import Action

__all__ = ["Recorder", "WatchingRecorder", "record_special"]

#: Why-opaque text of placeholders for bytes that a step does not read.
_OVERWRITTEN = "overwritten"
#: Why the result of an empty factory is opaque, until one operator has written all of it.
_UNINITIALISED = "uninitialised memory"


class Recorder(ObservingMode):
    """The dispatch mode of one tape at a time."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape: Tape | None = None


class WatchingRecorder(Recorder):
    """A recorder that notes which operators of a policy run; see `named_operators`."""

    def __init__(self, matches: Matches) -> None:
        super().__init__()
        self.matches = matches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.matches.note(func)
        return _C.torch_dispatch(self, func, types, args, kwargs)


# torch wraps the handlers of a class body so that the compiler skips them; this one is native.
setattr(Recorder, "__torch_dispatch__", _C.torch_dispatch)  # noqa: B010 - mypy takes it for a method


def record_special(
    tape: Tape, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None, action: Action | None
) -> Any:
    """Record an operator that writes, draws, allocates or communicates; `action` None: each result has its own."""
    choice, kwargs = tape.choice, kwargs or {}
    inputs: list[Value] = []
    num_unversioned_args = tape.num_unversioned_args
    arguments = [with_windows(tape, arg, inputs) for arg in args]
    keywords = {k: with_windows(tape, v, inputs) for k, v in kwargs.items()}
    step = Step(operator, arguments, keywords, inputs)
    written = _written_tensors(operator, args, kwargs)
    hidden = _hidden_tensors(operator, args, bool(written))
    why_unversioned = tape.why_unversioned if tape.num_unversioned_args != num_unversioned_args else ""
    why_opaque = _why_never(tape, operator, args, bool(hidden)) or why_unversioned or tape.why_opaque or ""
    if hidden and operator.has_form_without_effect:
        step.args = operator.without_effect(arguments)
        step.inputs = _values_in(step.args)
    generators = _begin_random(tape, step, args, kwargs)
    early = _saved_too_early(tape, operator, args)
    old = [_begin_write(tape, step, tensor) for tensor in written]
    for tensor in hidden:
        _begin_write(tape, None, tensor)

    result = _called(tape, operator, args, kwargs, [*written, *hidden])

    if operator.forgets_versions:
        increment_version([tensor for tensor in written if not tensor.is_inference()])
    if generators is not None and not _has_moved(generators):
        step.random = None
    if choice.asks_calls:
        action = choice.after_call(operator.func, args, kwargs, result)
    for tensor, value in zip(written, old, strict=True):
        _end_write(tape, step, tensor, value, action, why_opaque)
    for tensor in hidden:
        _end_write(tape, None, tensor, None, None, "written by an operator with effects")
    if early is not None:
        saved_tensor_hooks.point_at(tape, early, args[operator.saved_before_written])
    add_results(tape, step, result, action, why_opaque)
    if operator.is_repeatable:
        collectives.note(tape, operator, result)
    return result


def _called(
    tape: Tape, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], overwritten: list[Tensor]
) -> Any:
    """Run an operator. If it fails, what it was to overwrite may be partly overwritten."""
    try:
        return operator.func(*args, **kwargs)
    except BaseException:
        for tensor in overwritten:
            _end_write(tape, None, tensor, None, None, "an operator that writes to it failed")
        raise


def _values_in(args: Any) -> list[Value]:
    values = []
    for arg in args:
        if isinstance(arg, Window):
            values.append(arg.value)
        elif isinstance(arg, list):
            values.extend(_values_in(arg))
    return values


def _tensors_in(args: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif isinstance(arg, (list, tuple)):
            tensors.extend(_tensors_in(arg))
    return tensors


def _written_tensors(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call declares it writes to."""
    places = [args[position] for position in operator.written if position < len(args)]
    return _tensors_in([*places, *(kwargs.get(name) for name in operator.written_names)])


def _hidden_tensors(operator: Operator, args: tuple[Any, ...], has_written: bool) -> list[Tensor]:
    """Return the tensors that a call writes to without declaring it (Rule 5)."""
    if operator.is_collective and not has_written:
        return [] if operator.name.startswith("_c10d_functional") else _tensors_in(args)
    return [args[position] for position in operator.writes_hidden(args)]


def _why_never(tape: Tape, operator: Operator, args: tuple[Any, ...], has_hidden_writes: bool) -> str:
    """Return why a call's results must not be replayed, whatever the policy says; empty if they may be."""
    if operator.is_repeatable and collectives.is_named(tape, operator):
        return ""
    return _why_opaque(operator, args, has_hidden_writes)


def _why_opaque(operator: Operator, args: tuple[Any, ...], has_hidden_writes: bool) -> str:
    """Return why a call's results must not be replayed; empty if they may be."""
    if operator.is_uninitialised:
        return _UNINITIALISED
    if operator.is_collective:
        return "a collective"
    if operator.reshapes_storage:
        return "its storage was replaced or resized"
    if operator.has_effects or (has_hidden_writes and not operator.has_form_without_effect):
        return "an operator with effects"
    if operator.reads_outside:
        return "read from outside of the program"
    if operator.is_nondeterministic_on_cuda and _is_nondeterministic_on_accelerator(operator, args):
        return "nondeterministic on accelerators"
    if operator.nondeterministic_threads and _is_nondeterministic_on_cpu(operator, args):
        return "nondeterministic on the CPU"
    if operator.is_random and devices.is_capturing():
        return "random numbers in a stream capture"
    return ""


def _is_nondeterministic_on_accelerator(operator: Operator, args: tuple[Any, ...]) -> bool:
    flag = operator.nondeterministic_flag
    return (
        (flag is None or bool(args[flag]))
        and not torch.are_deterministic_algorithms_enabled()
        and any(map(devices.is_on_accelerator, _tensors_in(args)))
    )


def _is_nondeterministic_on_cpu(operator: Operator, args: tuple[Any, ...]) -> bool:
    has_threads = torch.get_num_threads() >= operator.nondeterministic_threads
    return has_threads and any(tensor.is_cpu for tensor in _tensors_in(args))


def _begin_random(tape: Tape, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Capture the generators that a call may draw from (Rule 3); returns them if it is unknown whether it does."""
    operator = step.operator
    if not (operator.is_random or operator.is_foreign) or devices.is_capturing():
        return None
    of_devices = [tensor.device for tensor in _tensors_in(args)]
    if kwargs.get("device") is not None:
        of_devices.append(torch.device(kwargs["device"]))
    explicit = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Generator)]
    if explicit:
        step.random = explicit[0].device, explicit[0].get_state()
        return None
    of_devices = [device for device in of_devices if device.type not in ("cpu", "meta")]
    generators = random_state.generators_of_devices(of_devices)
    own = generators[-1]
    if operator.generator_name is not None and isinstance(own, torch.Generator):
        step.random = own.device, own.get_state()
        return None
    if operator.is_foreign:  # may pass its arguments to another device
        generators = random_state.generators_of_region(of_devices)
    step.random = random_state.capture(generators)
    tape.swap = _C.current_swap()
    return (generators, [generator.get_state() for generator in generators]) if not operator.is_random else None


def _has_moved(generators: Any) -> bool:
    return any(not torch.equal(generator.get_state(), state) for generator, state in zip(*generators, strict=True))


def _saved_too_early(tape: Tape, operator: Operator, args: tuple[Any, ...]) -> Any:
    """Take from its value the handle under which autograd saved an argument that this call writes to."""
    position = operator.saved_before_written
    if position < 0 or args[position] is None or not torch.is_grad_enabled():
        return None
    if not any(tensor.requires_grad for tensor in _tensors_in(args)):
        return None
    value = tape.value_of(args[position])
    return value.take_last_handle() if value is not None else None


def _begin_write(tape: Tape, step: Step | None, tensor: Tensor) -> Value | None:
    """Prepare for an overwrite: copy what it destroys if that is needed (Rule 1)."""
    value = tape.value_of(tensor)
    if value is None:
        return None
    if step is not None and value not in step.written:
        is_whole = covers_all(tensor, value.nbytes)
        is_read = not step.operator.overwrites or not (is_whole or value.why_opaque == _UNINITIALISED)
        if not is_read and step.inputs.count(value) == 1:
            old, value = value, blank_of(value, _OVERWRITTEN if is_whole else _UNINITIALISED)
            redirect(step, old, value)
        step.add_written(value)
    tape.protect(tape.value_of(tensor))
    return value


def _end_write(
    tape: Tape, step: Step | None, tensor: Tensor, old: Value | None, action: Action | None, why_opaque: str
) -> None:
    """Assign the new value of a written tensor to its storage."""
    storage = _C.strided_storage_of(tensor)
    if storage is None:
        return
    nbytes = storage.nbytes()
    known = tape.storages.get(id(storage))
    if known is None or known.storage() is not storage:
        unknown = tape.value_of(tensor)  # `set_` gave it an unknown storage: an input of the region
        assert unknown is not None
        unknown.version = -1  # incremented after this handler returns
        return
    if step is not None and step.operator.reshapes_storage and known.value is not old:
        return  # `set_` gave it a known storage, and wrote nothing
    if known.value.step is step and step is not None:
        return  # two written arguments share one storage
    value = tape.new_value(nbytes, tensor.device)
    if old is not None and old.action not in (None, Action.RECOMPUTE):
        action = old.action
    was_resized = old is not None and old.why_opaque is _OVERWRITTEN and not covers_all(tensor, nbytes)
    if was_resized or nbytes != known.value.nbytes:
        why_opaque = why_opaque or "its storage was replaced or resized"
    elif old is not None and old.why_opaque == _UNINITIALISED:
        why_opaque = why_opaque or _UNINITIALISED
    place = step.written.index(old) if step is not None and old is not None else 0
    operator = None if step is None else step.operator
    add_value(tape, value, step, operator, place, tensor, action, why_opaque)
    value.version = -1  # incremented after this handler returns
    if is_unread(known.value):
        known.value.held = None
    _note_written_state(tape, known.value, value, tensor)
    known.value = value


def _note_written_state(tape: Tape, old: Value, new: Value, tensor: Tensor) -> None:
    """Record an in-place write to external state (Rule 6)."""
    is_first = old.is_input and not old.is_parameter and not tensor.requires_grad
    if not is_first and (tape.written_state is None or old not in tape.written_state):
        return
    if tape.written_state is None:
        tape.written_state = weakref.WeakSet()
    tape.written_state.add(new)
