"""Run a training step on fake tensors, with a model that may have real ones.

Operators run under torch's FakeTensorMode: they compute shapes, and nothing is allocated. Fakes are CPU tensors, since
a CPU build of torch aborts if CUDA fakes need gradients. So devices that the program names are replaced by the CPU, and
their autocast by the CPU's. Kernels that the target has and the CPU lacks are replaced too
(actckpt/_estimate/kernels.py).

External tensors become fakes when they are passed to a module or a torch function, always the same fake for the same
tensor. Host tensors that the program moves to a device are copied, as on the device. Integers with known numbers can be
read (actckpt/_estimate/numbers.py).

A model is replaced by putting fakes into its modules. Afterwards the attributes of modules and optimizer, their
containers, random state and the default dtype are restored. No operator reaches the real tensors, so they are never
written. Modules are moved and converted by making new parameters, since `nn.Module.to` would swap fakes, which torch
rejects. An optimizer may read numbers of its state (the step count): each is 0.5, so that none divides by zero.

torch functions are replaced only for the thread that runs the step; other threads continue with real tensors.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from actckpt._core import torch_private
from actckpt._core.training_state import random_state, set_random_state
from actckpt._estimate import kernels
from actckpt._estimate.numbers import Numbers, questions
from actckpt._estimate.targets import Target

__all__ = ["Fakes"]

#: torch functions are replaced: two threads must not restore them in the wrong order.
_one_at_a_time = threading.RLock()
_CPU = torch.device("cpu")
#: Position of the device argument in functions that move tensors, and the name of non-CPU devices.
_DEVICE_AT, _ELSEWHERE = {"to": 1, "_parse_to": 0}, "cuda"
_STAY = ("cpu",)


class Fakes:
    """A context in which every tensor is a fake one.

    Args:
        target: the operators use its kernels, or replacements of these.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.mode: Any = torch_private.fake_mode()
        self._numbers = Numbers()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._host: set[int] = set()
        self._thread = threading.get_ident()
        self._exits = contextlib.ExitStack()
        #: An optimizer is running its step.
        self.updating = False

    def __enter__(self) -> Fakes:
        with contextlib.ExitStack() as exits:
            exits.enter_context(_one_at_a_time)
            exits.callback(set_random_state, random_state())
            exits.callback(torch.set_default_dtype, torch.get_default_dtype())
            for hook in (
                register_optimizer_step_pre_hook(self._begin_update),
                register_optimizer_step_post_hook(self._end_update),
            ):
                exits.callback(hook.remove)
            exits.enter_context(_replaced(nn.Module, "_apply", _apply))
            exits.enter_context(_replaced(nn.Module, "__call__", self._calling(nn.Module.__call__)))
            exits.enter_context(_replaced(torch.amp.autocast_mode.autocast, "__init__", _cpu_autocast()))
            if not self._target.is_cpu:
                for name, kernel in kernels.STAND_INS.items():
                    exits.enter_context(_replaced(nn.functional, name, kernel))
            for module, name, answer in questions(self._numbers):
                exits.enter_context(_replaced(module, name, answer))
            exits.enter_context(self.mode)
            exits.enter_context(self._numbers)
            exits.enter_context(_Redirect(self, {} if self._target.is_cpu else kernels.by_function()))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exits.close()

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if parameters and not isinstance(parameters[0], torch_private.fake_tensor_type):
            raise ValueError(
                f"estimate: the step runs an optimizer ({type(optimizer).__name__}) that was not given. Pass it: "
                "optimizer=, so that its state is counted."
            )
        self.updating = True

    def _end_update(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self.updating = False

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a fake stands for an external tensor in host memory."""
        return id(tensor.untyped_storage()) in self._host

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake for a tensor; the tensor itself if it is one of this mode."""
        if getattr(tensor, "fake_mode", None) is self.mode:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self._new(tensor)
        return self._made[id(tensor)][1]

    def within(self, value: Any) -> Any:
        """Return a value with external tensors replaced by fakes; the value itself if it has none."""
        if isinstance(value, Tensor):
            return self.of(value)
        if type(value) in (tuple, list):
            items = [self.within(item) for item in value]
            return value if all(map(operator.is_, items, value)) else type(value)(items)
        if type(value) is dict:
            items = [self.within(item) for item in value.values()]
            is_same = all(map(operator.is_, items, value.values()))
            return value if is_same else dict(zip(value, items, strict=True))
        return value

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `nn.Module.__call__` that passes fakes on: regions see arguments before torch functions do."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return original(module, *self.within(args), **self.within(kwargs))

        return call

    def _new(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            return self.mode.from_tensor(tensor)  # type: ignore[no-any-return]
        storage = tensor.untyped_storage()
        if id(storage) not in self._storages:
            self._storages[id(storage)] = storage, torch.UntypedStorage(storage.nbytes(), device="meta")
        fake = torch_private.new_fake(
            self.mode,
            self._storages[id(storage)][1],
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
        )
        if tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter):
            self._host.add(id(fake.untyped_storage()))
        self._numbers.note_outside(fake, tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    @contextlib.contextmanager
    def replacing(self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> Iterator[None]:
        """Put fakes into a model and its optimizers, which start without state, for the duration of the body."""
        with contextlib.ExitStack() as exits:
            for module in model.modules():
                exits.callback(_held_by(module.__dict__))
            for optimizer in optimizers:
                exits.callback(_held_by(optimizer.__dict__))
                for group in optimizer.param_groups:
                    exits.callback(_held_by(group))
            for module in model.modules():
                held: tuple[dict[str, Any], ...] = module._parameters, module._buffers
                for tensors in held:
                    tensors.update(
                        {name: None if tensor is None else self.of(tensor) for name, tensor in tensors.items()}
                    )
            for buffer in model.buffers():
                self._host.discard(id(buffer.untyped_storage()))
            for optimizer in optimizers:
                self._replace_state(optimizer)
            yield

    def _replace_state(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state = defaultdict(dict)
        for group in optimizer.param_groups:
            group["params"][:] = [self.of(parameter) for parameter in group["params"]]
            if not self._target.is_cpu and not group.get("fused") and group.get("foreach", False) is None:
                group["foreach"] = True  # what optimizers choose on a GPU


def _held_by(attributes: dict[str, Any]) -> Callable[[], None]:
    """Return a function that restores attributes, and the contents of containers among them."""
    held = dict(attributes)
    contents = [(value, list(value)) for value in held.values() if type(value) in (list, set, deque)]
    items = [(value, list(value.items())) for value in held.values() if type(value) in (dict, OrderedDict, defaultdict)]

    def put_back() -> None:
        for name in [name for name in attributes if name not in held]:
            del attributes[name]
        attributes.update(held)
        for container, content in contents:
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(content)
        for container, entries in items:
            container.clear()
            container.update(entries)

    return put_back


class _Redirect(TorchFunctionMode):
    """Sees every torch function that the program calls."""

    def __init__(self, fakes: Fakes, stand_ins: dict[Any, Any]) -> None:
        super().__init__()
        self._fakes = fakes
        self._stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is torch.device or name == "__get__":  # a fake has the attributes of its tensor, except the version
            return func(*args, **(kwargs or {}))
        args = tuple(self._fakes.within(argument) for argument in args)
        kwargs = {name: self._fakes.within(argument) for name, argument in (kwargs or {}).items()}
        if func is torch.Tensor.item and self._fakes.updating:
            return 0.5
        if func is torch.Tensor.cuda:
            return self._on_device(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0]
        at = _DEVICE_AT.get(name)
        if at is not None and len(args) > at and type(args[at]) is int:
            args = (*args[:at], _ELSEWHERE, *args[at + 1 :])
        moves = func is torch.Tensor.to and any(map(_is_elsewhere, (*args[1:], kwargs.get("device"))))
        if func in torch_private.factories() and kwargs.get("device") is None:
            kwargs["device"] = _CPU
        args = tuple(_CPU if _is_elsewhere(argument) else argument for argument in args)
        kwargs = {name: _CPU if _is_elsewhere(argument) else argument for name, argument in kwargs.items()}
        if self._stand_ins:
            args = kernels.as_autocast(func, args)
        result = self._stand_ins.get(func, func)(*args, **kwargs)
        return self._on_device(result) if moves else result

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self._fakes.is_host(tensor) else tensor


def _is_elsewhere(value: Any) -> bool:
    """Whether an argument names a non-CPU device."""
    if isinstance(value, str):
        return value.partition(":")[0] in ("cuda", "xpu", "mps", "hip", "hpu", "npu", "mtia", "meta")
    return isinstance(value, torch.device) and value.type not in _STAY


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which makes new parameters if `fn` returns other tensors."""
    for inner in module.modules() if recurse else (module,):
        for name, parameter in inner._parameters.items():
            with torch.no_grad():
                converted = parameter if parameter is None else fn(parameter)
            if parameter is not None and converted is not None and converted is not parameter:
                inner._parameters[name] = nn.Parameter(converted, requires_grad=parameter.requires_grad)
        inner._buffers.update({name: None if buffer is None else fn(buffer) for name, buffer in inner._buffers.items()})
    return module


def _cpu_autocast() -> Callable[..., None]:
    original = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if _is_elsewhere(device_type) else device_type, *args, **kwargs)

    return init


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for this thread; other threads use the original."""
    original, thread = getattr(owner, name), threading.get_ident()

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (value if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        setattr(owner, name, original)
