"""Random programs over the store of device tensors: what a forward and backward on several streams may ask of it.

A program is right without a store: tensors are saved by operators on streams that wait for what they read, and the
memory of what is saved is not given back before `join`, where all streams meet. It is over the store's calls, so it
needs no autograd, and all of it follows from its seed.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import sim
import torch
from sim import device
from sim.device.accelerator import Simulated

from actckpt import _C
from actckpt._core import devices
from actckpt._offload.device import DeviceStore

_SIZES = (1024, 1024, 4096, 16384)
_KIND = torch.Stream(device="sim").device_type
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

#: The call of the store that runs, by its name; empty outside of calls.
running = ""


def _call(method: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs) -> _Result:
    """Call a method of the store or of a ticket."""
    global running
    running = method.__name__
    try:
        return method(*given, **named)
    finally:
        running = ""


def stream(index: int, number: int) -> torch.Stream:
    """Return a stream of a device, always the same one for a number; 0 is the default one."""
    return torch.Stream(stream_id=number, device_index=index, device_type=_KIND)


@dataclass
class Saved:
    """A tensor that the program has saved: where it was, what it holds, and how to get it back."""

    place: torch.device
    value: float
    numel: int
    home: torch.Stream
    ticket: _C.StoreTicket | None
    kept: torch.Tensor | None
    readers: list[torch.Stream] = field(default_factory=list)


class Program:
    """A random program; `run` raises where a value is wrong."""

    def __init__(self, seed: int, store: DeviceStore, num_devices: int = 2) -> None:
        self._random = random.Random(seed)
        self._store = store
        self._streams = [[stream(index, number) for number in range(3)] for index in range(num_devices)]
        self._saved: list[Saved] = []
        self._found: list[tuple[torch.Tensor, float]] = []
        self._num_made = 0

    def run(self, num_actions: int = 60) -> None:
        actions = [self._save] * 4 + [self._read] * 4 + [self._prefetch] * 2
        actions += [self._drop, self._unload, self._churn, self._join]
        for _ in range(num_actions):
            self._random.choice(actions)()
        self._join()
        while self._saved:
            self._read()
            self._drop()
        self._join()
        for tensor, value in self._found:
            assert torch.equal(tensor.cpu(), torch.full(tensor.shape, value)), f"{tensor} is not {value}"

    def _on(self, index: int) -> torch.Stream:
        return self._random.choice(self._streams[index])

    def _save(self) -> None:
        index = self._random.randrange(len(self._streams))
        home, user = self._on(index), self._on(index)
        self._num_made += 1
        with home:
            tensor = torch.full((self._random.choice(_SIZES),), float(self._num_made), device=f"sim:{index}")
        user.wait_stream(home)
        saved = Saved(tensor.device, float(self._num_made), tensor.numel(), home, None, None)
        with user:
            source = _C.Bytes(tensor.untyped_storage(), 0)
            saved.ticket = _call(self._store.put, source, tensor.nbytes, must=self._random.random() < 0.7)
            self._use(tensor, saved.value)
        if saved.ticket is None:
            saved.kept = tensor
        elif self._random.random() < 0.5:
            self._save_again(saved, tensor)
        self._saved.append(saved)

    def _save_again(self, saved: Saved, tensor: torch.Tensor) -> None:
        assert saved.ticket is not None and saved.place.index is not None
        other = self._on(saved.place.index)
        other.wait_stream(saved.home)
        with other:
            _call(saved.ticket.saved_again, tensor.untyped_storage())
            self._use(tensor, saved.value)

    def _use(self, tensor: torch.Tensor, value: float) -> None:
        self._found.append((tensor[:8] * 2, 2 * value))

    def _read(self) -> None:
        if not self._saved:
            return
        saved = self._random.choice(self._saved)
        assert saved.place.index is not None
        user = self._on(saved.place.index)
        user.wait_stream(saved.home)
        with user:
            self._use(self._back(saved), saved.value)

    def _back(self, saved: Saved) -> torch.Tensor:
        if saved.ticket is None:
            assert saved.kept is not None
            return saved.kept
        found = _call(saved.ticket.fetch)
        tensor = torch.empty(0, device=saved.place)
        return tensor.set_(found.storage, found.start // 4, (saved.numel,), (1,))

    def _prefetch(self) -> None:
        tickets = [(saved.place.index, saved.ticket) for saved in self._saved if saved.ticket is not None]
        if tickets:
            index, ticket = self._random.choice(tickets)
            with self._on(index):
                _call(ticket.prefetch)

    def _unload(self) -> None:
        tickets = [saved.ticket for saved in self._saved if saved.ticket is not None]
        if tickets:
            self._random.choice(tickets).unload()

    def _drop(self) -> None:
        if self._saved:
            saved = self._saved.pop(self._random.randrange(len(self._saved)))
            if saved.kept is not None:
                self._join()

    def _churn(self) -> None:
        """Others allocate and write."""
        index = self._random.randrange(len(self._streams))
        with self._on(index):
            for numel in _SIZES:
                torch.full((numel,), -1.0, device=f"sim:{index}")

    def _join(self) -> None:
        """All streams of a device wait for each other."""
        for streams in self._streams:
            for _ in range(2):
                for first, second in zip(streams, streams[1:] + streams[:1], strict=True):
                    second.wait_stream(first)
        self._store.engine.poll()


@contextmanager
def store(
    seed: int, folder: str, rule: str = "", make_accelerator: Callable[[], Simulated] = Simulated
) -> Iterator[DeviceStore]:
    """Make a store over the simulated device, with room that its seed says, whose engine leaves out a rule.

    Half of them have little pinned memory, and half of those a disk below it that fails at some write. There are no
    threads: what workers do is done where the engine waits, and at `poll`.

    Args:
        rule: see `sim.driver_without`.
        make_accelerator: what makes the accelerator of the store.
    """
    own = random.Random(seed)
    is_small, fails = own.random() < 0.5, own.random() < 0.5
    io = sim.FaultyFileIo()
    if is_small and fails:
        failing = sim.Faults()
        failing.fail_write_at, failing.write_errno = own.randrange(20), errno.EIO
        io.set(failing)
    accelerator = make_accelerator()
    engine = _C.DeviceEngine.cuda(
        driver=sim.driver_without(device.library_path, rule),
        limit_bytes=own.choice([1 << 15, 1 << 17]) if is_small else 1 << 22,
        window_bytes=own.choice([1 << 13, 1 << 15, 1 << 17]),
        release=_C.TorchStreams(accelerator),
        spill_file=sim.spill_file(folder, io),
        bounce_bytes=1 << 18,
        buffer_bytes=1 << 14,
        num_workers=0,
    )
    undo = devices.register(accelerator)
    try:
        yield DeviceStore(engine, accelerator)
    finally:
        device.settle()
        engine.poll()  # what it holds goes while the accelerator is known
        undo()


def run_program(seed: int, store: DeviceStore) -> list[str]:
    """Run a program and return its faults, and what it raised."""
    device.set_adversary(seed, (0.0, 0.02, 0.2)[seed % 3], (0.98, 0.5, 0.0)[seed % 3])
    raised = []
    try:
        with device.judging_frees():
            Program(seed, store).run()
    except Exception as error:
        raised.append(f"{type(error).__name__}: {error}")
    device.settle()
    return device.take_faults() + raised
