"""The CUDA backend and its Python face, over a mock of the driver: no GPU is needed."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sim
from mock_tensor import DEFAULT, OTHER, PAGE, Rig, Tensor

from actckpt import _C


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.cuda.faults == []
    rig.released.clear()
    gc.collect()


def test_a_call_enters_its_context_once_and_the_mode_of_capture_where_it_queries(rig: Rig) -> None:
    tickets = [rig.put(Tensor()) for _ in range(3)]  # makes streams and events
    rig.settle()
    buffers = [Tensor() for _ in tickets]
    for ticket, buffer in zip(tickets, buffers, strict=True):
        ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=True)
        ticket.get(0, DEFAULT)
    del ticket
    tickets.clear()
    rig.settle()
    results: list[Any] = []

    def num_calls(call: Callable[[], object]) -> int:
        before = rig.cuda.num_calls
        results.append(call())
        return rig.cuda.num_calls - before

    assert num_calls(lambda: rig.put(Tensor())) == 7  # push, is capturing, record, wait, copy, record, pop
    assert num_calls(lambda: rig.put(Tensor())) == 10  # and relaxed, queries the copy before, back
    rig.settle()
    ticket, buffer = results[0], buffers[0]
    assert num_calls(lambda: ticket.get(0, DEFAULT)) == 3  # push, is capturing, pop
    # Push, is capturing, record, two waits, copy, record, pop.
    assert num_calls(lambda: ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=True)) == 8
    # Push, is capturing, a wait between two events that are timed, pop.
    assert num_calls(lambda: ticket.get(0, DEFAULT)) == 6
    assert results[2:] == [None, True, (buffer, False)]


def test_a_get_hands_back_sources_that_have_passed_before_memory_for_its_load_is_allocated(rig: Rig) -> None:
    ticket, other = rig.put(Tensor()), Tensor()
    rig.settle()
    rig.released.clear()
    behind = rig.put(other)
    rig.cuda.drain()  # and nobody polls
    assert rig.released == [] and ticket.get(0, DEFAULT) is None
    assert rig.released == [(other, [(0, DEFAULT)])] and behind.nbytes == other.nbytes


def test_a_reload_waits_once_per_stream_and_wants_record_stream_away_from_home(rig: Rig) -> None:
    ticket = rig.put(Tensor())
    rig.settle()
    buffer = Tensor()
    assert ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=True)
    assert not ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=True)
    assert ticket.get(0, DEFAULT) == (buffer, False)
    calls = rig.cuda.num_calls
    assert ticket.get(0, DEFAULT) == (buffer, False)
    again = rig.cuda.num_calls - calls
    assert ticket.get(0, OTHER) == (buffer, True)
    assert rig.cuda.num_calls - calls - again > again  # the other stream asks, and waits


def test_the_window_releases_the_oldest_sources_at_once() -> None:
    rig = Rig(window_bytes=2 * PAGE)
    tensors = [Tensor() for _ in range(5)]
    tickets = [rig.put(tensor) for tensor in tensors]
    assert [keep for keep, _ in rig.released] == tensors[:3]
    assert rig.engine.stats().peak_inflight_bytes <= 3 * PAGE
    assert len(tickets) == 5 and rig.cuda.faults == []


def test_drop_makes_no_driver_call_and_nothing_in_flight_is_freed(rig: Rig) -> None:
    tensor = Tensor()
    alive = weakref.ref(tensor)
    ticket = rig.put(tensor)
    del tensor
    calls = rig.cuda.num_calls
    ticket.drop()
    del ticket
    assert rig.cuda.num_calls == calls
    assert alive() is not None and rig.released == []
    rig.settle()
    rig.released.clear()
    assert alive() is None
    assert rig.engine.stats().num_live == 0


def test_a_read_destination_is_dropped_at_once(rig: Rig) -> None:
    ticket = rig.put(Tensor())
    rig.settle()
    buffer = Tensor()
    alive = weakref.ref(buffer)
    ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=True)
    ticket.get(0, DEFAULT)
    del buffer
    ticket.drop()
    assert alive() is None


@pytest.mark.parametrize("stream", [DEFAULT, OTHER])
def test_a_capturing_stream_keeps(rig: Rig, stream: int) -> None:
    tensor = Tensor()
    rig.cuda.set_capturing(1, True)  # queue 1 captures; then the legacy stream answers IMPLICIT
    count = sys.getrefcount(tensor)
    assert rig.engine.put(tensor.ptr, tensor.nbytes, 0, stream, tensor) == _C.Kept.CAPTURING
    assert sys.getrefcount(tensor) == count and rig.engine.stats().num_kept_capturing == 1


def test_what_a_capturing_stream_or_a_dropped_ticket_cannot_do_raises(rig: Rig) -> None:
    ticket = rig.put(Tensor())
    rig.settle()
    buffer = Tensor()
    count = sys.getrefcount(buffer)
    rig.cuda.set_capturing(1, True)
    rig.engine.poll()  # queries run in RELAXED mode
    with pytest.raises(_C.OffloadError, match=r"get: the stream is being captured .*reload before capture"):
        ticket.get(0, OTHER)
    with pytest.raises(_C.OffloadError, match="load: the stream is being captured: reload before capture"):
        ticket.load(0, OTHER, buffer.ptr, buffer, urgent=True)
    rig.cuda.set_capturing(1, False)
    for _ in range(2):
        ticket.drop()
    with pytest.raises(_C.OffloadError, match="get: this ticket was dropped"):
        ticket.get(0, DEFAULT)
    with pytest.raises(_C.OffloadError, match="load: this ticket was dropped"):
        ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=True)
    assert sys.getrefcount(buffer) == count and rig.engine.stats().last_error == ""


def test_a_consumer_that_cannot_wait_for_its_reload_raises_and_nothing_is_recycled(rig: Rig) -> None:
    ticket = rig.put(Tensor())
    rig.settle()
    buffer = Tensor()
    ticket.load(0, DEFAULT, buffer.ptr, buffer, urgent=True)
    assert ticket.get(0, DEFAULT) == (buffer, False)
    rig.cuda.fail_at(6, 700)  # push, relaxed, a query, is capturing, record, and this: the other stream's wait
    with pytest.raises(_C.OffloadError, match=r"cuStreamWaitEvent returned CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        ticket.get(0, OTHER)
    with pytest.raises(_C.OffloadError, match="an earlier device call failed: get: "):
        ticket.get(0, DEFAULT)
    assert rig.engine.put(1 << 60, PAGE, 0, DEFAULT, None) == _C.Kept.FAILED


def test_an_engine_that_goes_waits_for_its_copies_and_hands_their_sources_back(rig: Rig) -> None:
    tensor = Tensor()
    rig.put(tensor).drop()
    assert rig.released == [] and rig.cuda.num_pinned_bytes > 0  # nothing has run yet
    del rig.engine
    assert rig.released == [(tensor, [(0, DEFAULT)])] and rig.cuda.num_pinned_bytes == 0


def test_slots_are_used_again_in_stream_order_before_the_pool_grows() -> None:
    rig = Rig(limit_bytes=2 * PAGE)
    for _ in range(50):  # the device never gets a chance: the host is 50 steps ahead
        rig.put(Tensor(2)).drop()
    assert rig.engine.stats().num_kept_full == 0
    assert rig.engine.pool_stats().peak_pool_bytes <= 2 * PAGE
    rig.settle()
    assert rig.cuda.faults == []


def test_a_refused_pin_keeps_and_fixes_the_limit() -> None:
    rig = Rig()
    rig.cuda.refuse_pins(True)
    tensor = Tensor()
    assert rig.engine.put(tensor.ptr, tensor.nbytes, 0, DEFAULT, tensor) == _C.Kept.FULL
    stats = rig.engine.pool_stats()
    assert (stats.limit_bytes, stats.num_refused_pins, stats.pool_bytes) == (0, 1, 0)


def test_no_driver_call_after_close() -> None:
    rig = Rig()
    ticket = rig.put(Tensor())
    rig.engine.shutdown()
    calls = rig.cuda.num_calls
    ticket.drop()
    rig.engine.poll()
    del ticket
    cuda = rig.cuda
    del rig
    gc.collect()
    assert cuda.num_calls == calls


def test_an_exception_of_release_is_reported_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(info.exc_type))
    cuda = sim.MockCuda()

    def release(keep: object, uses: list[tuple[int, int]]) -> None:
        raise LookupError

    engine = cuda.engine(limit_bytes=1 << 20, window_bytes=1 << 20, release=release)
    tensor = Tensor()
    alive = weakref.ref(tensor)
    ticket = engine.put(tensor.ptr, tensor.nbytes, 0, DEFAULT, tensor)
    del tensor
    cuda.drain()
    engine.poll()
    assert seen == [LookupError] and alive() is None
    assert isinstance(ticket, _C.DeviceTicket)


def test_a_missing_driver_or_symbol_is_named() -> None:
    for library, why in [
        ("libno-such-driver.so.1", r"no driver libno-such-driver\.so\.1: .*cannot open"),
        ("libm.so.6", r"the driver libm\.so\.6 lacks cuInit; update it"),
    ]:
        assert re.match(why, sim.missing_in_driver(library))
        assert re.match(why, _C.why_no_driver(library))
        with pytest.raises(_C.OffloadError, match=f"cannot be moved: {why}"):
            _C.DeviceEngine.cuda(limit_bytes=1, window_bytes=1, release=lambda keep, uses: None, library=library)


_AT_EXIT = """
    import atexit, sys
    engines = []

    @atexit.register  # before the package is imported, so that it runs after what that registers
    def tell():
        (cuda, engine), calls = engines, engines[0].num_calls
        kept = engine.put(1 << 60, 4096, 0, 0, None)
        print(str(kept), engine.stats().last_error, cuda.num_calls - calls)

    sys.path.insert(0, sys.argv[1])
    import sim
    cuda = sim.MockCuda()
    engine = cuda.engine(limit_bytes=1 << 20, window_bytes=1 << 20, release=lambda keep, uses: None)
    engines += cuda, engine
    ticket = engine.put(1 << 60, 4096, 0, 0, None)
"""


def test_an_engine_makes_no_driver_call_once_the_process_ends() -> None:
    command = [sys.executable, "-c", textwrap.dedent(_AT_EXIT), str(Path(sim.__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.split() == ["Kept.FAILED", "the", "process", "is", "ending", "0"]


_HOST: dict[str, Any] = {"window_bytes": None, "bounce_bytes": 1 << 20}
_CUDA: dict[str, Any] = {"limit_bytes": 1, "window_bytes": 1, "release": lambda keep, uses: None}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (_C.DeviceEngine.host, {**_HOST, "buffer_bytes": 100}, "buffer_bytes must be a multiple of 4096, got 100"),
        (_C.DeviceEngine.host, {**_HOST, "num_workers": -1}, "num_workers must not be negative, got -1"),
        (_C.DeviceEngine.cuda, {**_CUDA, "library": "libm.so.6", "num_workers": 0}, "num_workers must be at least 1"),
        (_C.DeviceEngine.cuda, {**_CUDA, "library": "libm.so.6", "buffer_bytes": 0}, "a multiple of 4096, got 0"),
        (_C.DeviceEngine.cuda, _CUDA, "name the driver's library"),
        (sim.MockCuda().engine, {**_CUDA, "library": "libm.so.6"}, "or give a driver in its place"),
    ],
)
def test_options_that_no_engine_can_have_are_named(
    make: Callable[..., object], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if "bounce_bytes" in options:
        options = {**options, "spill_file": _C.SpillFile(str(tmp_path))}
    with pytest.raises(ValueError, match=message):
        make(**options)
    assert sim.MockCuda().engine(**_CUDA).library == ""
