"""Peak activation bytes, counted exactly instead of read from the operating system.

Resident memory shows what malloc keeps, not what a training step needs. Here every storage that an operator allocates
is counted once, from the operator's return until the storage dies. `LiveStorages` is the counter; `measure_step`
compares methods on any device.

- A storage counts when it first leaves an operator and was not among that operator's arguments. So what existed before
  (parameters, buffers, the input batch) never counts, whatever it grows to. Neither does memory made without an
  operator (NumPy arrays, mapped files, raw kernels), nor an operator's own workspace, which is freed before it returns.
- Bytes are those of the storage, not of the tensor: a view keeps all of it alive and costs nothing more.
- A storage stops counting when its last owner releases it. torch keeps the Python object of a storage as long as the
  C++ storage is alive, so a weak reference to it dies exactly then.
- The gradient of a parameter counts as an activation until it is accumulated, since backward needs room for it. What
  `param.grad` then holds is reported separately, or existed before.
- Meta tensors and fake tensors have no bytes; `device="meta"` counts those that they would have. Sparse tensors count
  their parts; layouts without a visible storage (mkldnn) cannot be counted.
- Dispatch modes belong to a thread. Autograd gives its device threads the modes of the thread that called backward, so
  these are seen, and the counter takes a lock. Threads that the program starts itself are not seen.
- Compiled code runs compiled: what inductor allocates bypasses the dispatcher and is not seen.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from actckpt._blocks.choosing import check_model
from actckpt._core import devices, simulated, torch_private
from actckpt._core.memory_by_module import explain
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.optimizers import Optimizers, optimizers_of
from actckpt._core.storages import storages_of

__all__ = ["LiveStorages", "StepMemory", "explain_oom", "measure_step"]


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A weak reference to one counted storage, with its counted bytes."""

    __slots__ = ("is_gradient", "key", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, on_death: Callable[[_Entry], None]) -> None:
        super().__init__(storage, on_death)  # type: ignore[call-arg]  # typeshed knows __new__ only
        self.key = id(storage)
        self.nbytes = storage.nbytes()
        self.is_gradient = False


class LiveStorages(ObservingMode):
    """Count the bytes of the storages that operators allocate inside the `with` block and that are still alive.

    Counters nest, end in any order, may be reentered (they continue to count) and keep nothing alive. After the block
    nothing new is counted, but deaths still are, so `live_bytes` shows how many bytes that the block made are alive.

    Args:
        parameters: leaf tensors whose gradients move from `live_bytes` to `gradient_bytes` once they are accumulated.
        device: count only storages on devices of this type ("cpu", "cuda"); None counts all that have bytes; "meta"
            counts what the storages of meta tensors and of fake ones, whatever their device, would hold.
        timeline: also record every change of `live_bytes` for `timeline`.

    Raises:
        ValueError: one of `parameters` is not a leaf, so no gradient is ever accumulated in it.

    Example::

        with LiveStorages(parameters=model.parameters()) as live:
            loss = model(x).sum()
            held_bytes = live.live_bytes
            loss.backward()
        print(held_bytes, live.peak_bytes)

    Cost: some microseconds per operator; do not time a step under it.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        parameters: Iterable[torch.Tensor] = (),
        device: torch.device | str | None = None,
        timeline: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = tuple(p for p in parameters if p.requires_grad)
        if inner := [tuple(p.shape) for p in self._parameters if not p.is_leaf]:
            raise ValueError(
                f"LiveStorages: {len(inner)} of {len(self._parameters)} parameters are not leaves, the first "
                f"has shape {inner[0]}. Pass model.parameters(), or tensors made with requires_grad=True."
            )
        device = "meta" if simulated.is_simulated() else device
        self._device_type = None if device is None else torch.device(device).type
        self._timeline: list[tuple[float, int]] | None = [] if timeline else None
        self._start_s = time.perf_counter()
        self._entries: dict[int, _Entry] = {}
        self._deaths: deque[tuple[float, _Entry]] = deque()
        self._lock = threading.RLock()  # reentrant: a collection inside it may run finalizers that call back
        self._live_bytes = self._gradient_bytes = self._peak_bytes = 0
        self._hooks: list[Any] = []  # one per parameter and entry, newest last

    @property
    def live_bytes(self) -> int:
        """Live bytes, without accumulated gradients of `parameters`."""
        with self._lock:
            self._count_deaths()
            return self._live_bytes

    @property
    def gradient_bytes(self) -> int:
        """Live bytes in gradients of `parameters` that were accumulated inside the block."""
        with self._lock:
            self._count_deaths()
            return self._gradient_bytes

    @property
    def peak_bytes(self) -> int:
        """Largest `live_bytes` since the start or the last `reset_peak`."""
        return self._peak_bytes

    @property
    def timeline(self) -> tuple[tuple[float, int], ...]:
        """`(seconds since the counter was made, live bytes)` after every change; empty unless requested."""
        with self._lock:
            self._count_deaths()
            return tuple(self._timeline or ())

    def reset_peak(self) -> None:
        """Reset the peak to the live bytes."""
        with self._lock:
            self._count_deaths()
            self._peak_bytes = self._live_bytes

    def count(self, tensor: torch.Tensor, outside: Container[int]) -> None:
        """Count a tensor from code that no dispatch mode sees, for example compiled code.

        Args:
            outside: ids of storages that do not count.
        """
        with self._lock:
            self._count_deaths()
            for storage in storages_of(tensor):
                self._note_output(storage, is_new=id(storage) not in outside)

    def __enter__(self) -> LiveStorages:
        super().__enter__()  # type: ignore[no-untyped-call]
        _resize_watch.add(self._note_resize)
        for parameter in self._parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._note_gradient)
            self._hooks.append(hook)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _resize_watch.remove(self._note_resize)
        for _ in self._parameters:
            self._hooks.pop().remove()
        self._leave_stack(*exc_info)

    def _leave_stack(self, *exc_info: Any) -> None:
        num_modes = torch_private.num_dispatch_modes()
        if num_modes and torch_private.dispatch_mode_at(num_modes - 1) is self:
            super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        else:  # torch would pop the innermost mode
            torch_private.remove_dispatch_mode(self)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass calls operators on its inner tensors, which are seen
        if func is torch.ops.prim.device.default:
            return func(*args)  # fake tensors call it for every operator
        kwargs = kwargs or {}
        before = {id(storage): storage for storage in storages_of((args, kwargs))}
        result = func(*args, **kwargs)
        # `torch.tensor` makes its storage without an operator and passes it through this one first.
        known = {} if func is torch.ops.aten.lift_fresh.default else before
        with self._lock:
            self._count_deaths()
            for storage in before.values():
                self._note_resize(storage)  # an argument may have been resized in place
            for storage in storages_of(result):
                self._note_output(storage, is_new=id(storage) not in known)
        return result

    def _entry(self, storage: torch.UntypedStorage) -> _Entry | None:
        """The entry of a counted storage. A pending death may have left another one at its address."""
        entry = self._entries.get(id(storage))
        return entry if entry is not None and entry() is storage else None

    def _note_output(self, storage: torch.UntypedStorage, *, is_new: bool) -> None:
        if self._entry(storage) is not None:
            self._note_resize(storage)
        elif is_new and self._counts(storage):
            deaths = self._deaths  # not self: a callback must not keep the counter alive

            def note_death(entry: _Entry) -> None:
                # Runs wherever the storage dies, perhaps inside our lock or in another thread: only append.
                deaths.append((time.perf_counter(), entry))

            entry = _Entry(storage, note_death)
            self._entries[entry.key] = entry
            self._change(entry, entry.nbytes)

    def _counts(self, storage: torch.UntypedStorage) -> bool:
        kind = storage.device.type  # a fake tensor names the device that it stands for, its storage does not
        return kind != "meta" if self._device_type is None else kind == self._device_type

    def _note_resize(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            entry = self._entry(storage)
            if entry is not None and (change := storage.nbytes() - entry.nbytes) != 0:
                entry.nbytes += change
                self._change(entry, change)

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        with self._lock:
            self._count_deaths()
            for storage in storages_of(parameter.grad):
                entry = self._entry(storage)
                if entry is not None and not entry.is_gradient:
                    self._change(entry, -entry.nbytes)
                    entry.is_gradient = True
                    self._change(entry, entry.nbytes)

    def _count_deaths(self) -> None:
        while self._deaths:
            died_s, entry = self._deaths.popleft()
            if self._entries.get(entry.key) is entry:  # the address may already belong to a younger storage
                del self._entries[entry.key]
            self._change(entry, -entry.nbytes, now_s=died_s)

    def _change(self, entry: _Entry, change: int, *, now_s: float | None = None) -> None:
        if entry.is_gradient:
            self._gradient_bytes += change
            return
        self._live_bytes += change
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        if self._timeline is not None and change != 0:
            elapsed_s = (time.perf_counter() if now_s is None else now_s) - self._start_s
            self._timeline.append((elapsed_s, self._live_bytes))


@dataclass(frozen=True)
class StepMemory:
    """What one step needed beyond the memory in use before it.

    Attributes:
        peak_bytes: peak of the live activation bytes.
        timeline: `(seconds since the start, live storage bytes)` after every change; the seconds include the overhead
            of
            counting.
    """

    peak_bytes: int
    timeline: tuple[tuple[float, int], ...]


def measure_step(
    step: Callable[[], object], *, device: torch.device | str, parameters: Iterable[torch.Tensor]
) -> StepMemory:
    """Run `step` once and measure its peak activation bytes.

    Every parameter's gradient is allocated before the step (zeros if it was None). So gradients are not included, and
    plain, checkpointed and offloaded models can be compared. On a GPU the peak is the caching allocator's, which
    includes rounding and operators' workspaces; elsewhere it is that of `LiveStorages`.

    Args:
        step: runs forward and backward, and accumulates into the existing gradients.
        device: of the model.
        parameters: the model's parameters.

    Returns:
        Peak and timeline of the step.

    Raises:
        ValueError: `step` replaced gradients, as backward does after `zero_grad(set_to_none=True)`.
    """
    device = torch.device(device)
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in trained]
    gc.collect()  # earlier garbage must not be freed inside the step, where it would lower the peak
    allocator = devices.counting(device)
    before_bytes = 0 if allocator is None else allocator.reset_peak(device)
    with LiveStorages(device=device, timeline=True) as live:
        step()
    peak_bytes = live.peak_bytes if allocator is None else allocator.peak_bytes(device) - before_bytes
    if replaced := sum(p.grad is not grad for p, grad in zip(trained, gradients, strict=True)):
        raise ValueError(
            f"measure_step: the step replaced {replaced} of {len(trained)} parameter gradients, which would "
            "count as activations. Leave zero_grad(set_to_none=True) and the optimizer out of the step."
        )
    return StepMemory(peak_bytes=peak_bytes, timeline=live.timeline)


class _ResizeWatch:
    """Notifies its watchers of `UntypedStorage.resize_`, which no dispatch mode sees (FSDP frees memory with it)."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[torch.UntypedStorage], None]] = []
        self._lock = threading.Lock()
        self._is_patched = False
        self._restore: Callable[[], None] = lambda: None

    def add(self, watcher: Callable[[torch.UntypedStorage], None]) -> None:
        """Call `watcher` with every storage that was resized; the first watcher patches the method."""
        with self._lock:
            if not self._is_patched:
                self._patch(torch.UntypedStorage)
            self._watchers.append(watcher)

    def remove(self, watcher: Callable[[torch.UntypedStorage], None]) -> None:
        """Remove `watcher` once; the last one restores the method."""
        with self._lock:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._restore()

    def _patch(self, cls: Any) -> None:
        original = cls.resize_
        inherited = "resize_" not in cls.__dict__

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            for watcher in tuple(self._watchers):
                watcher(storage)
            return result

        def restore() -> None:
            if cls.__dict__.get("resize_") is not resize_:
                return  # someone, like the offload guard, has wrapped it since and calls it: it stays
            delattr(cls, "resize_") if inherited else setattr(cls, "resize_", original)
            self._is_patched = False

        cls.resize_ = resize_
        self._is_patched = True
        self._restore = restore


_resize_watch = _ResizeWatch()


@contextlib.contextmanager
def explain_oom(model: torch.nn.Module, optimizer: Optimizers = None) -> Iterator[None]:
    """Add a table of memory by module to out-of-memory errors.

    The table is a note of the error; before Python 3.11 it is added to the message. It has at most ten lines: tensors
    saved for backward, inputs of checkpoints, parameters, gradients, optimizer state, and other allocated memory. A
    saved tensor counts for the module whose parameter was used last before it. The model needs no `apply`.

    Args:
        model: the model whose modules are listed.
        optimizer: one or several optimizers, whose state is counted.
    Raises:
        TypeError: `model` is no module, or `optimizer` no optimizer.

    Example::

        with actckpt.explain_oom(model, optimizer):
            loss_fn(model(x)).backward()
            optimizer.step()

    Cost: none as long as nothing fails.
    """
    check_model(model, "explain_oom")
    optimizers = optimizers_of(optimizer, model, "explain_oom")
    try:
        yield
    except RuntimeError as error:
        explain(error, model, optimizers)
        raise
