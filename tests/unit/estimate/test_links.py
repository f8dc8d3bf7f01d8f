"""Bytes on their way over a link, by a clock."""

from __future__ import annotations

import pytest
import torch

import actckpt
from actckpt._estimate.bandwidth import Link
from actckpt._estimate.roofline import Clock
from actckpt._estimate.targets import named_target
from actckpt.memory import LiveStorages

_KIB = 1024


@pytest.fixture(autouse=True)
def _window() -> None:
    actckpt.configure(max_inflight=2 * _KIB)


def _clock() -> Clock:
    return Clock(named_target("h100"))


def test_what_is_written_stays_within_the_window_and_no_longer() -> None:
    clock = _clock()
    link = Link(clock, _KIB)  # one tensor of 1 KiB per second
    with LiveStorages() as live:
        tickets = [link.put(torch.empty(_KIB, dtype=torch.uint8).untyped_storage()) for _ in range(2)]
        assert live.live_bytes == 2 * _KIB and clock.seconds == 0
        tickets.append(link.put(torch.empty(_KIB, dtype=torch.uint8).untyped_storage()))
        assert live.live_bytes == 2 * _KIB and clock.stall_seconds == pytest.approx(1)
        clock.busy_seconds += 10
        tickets.append(link.put(torch.empty(_KIB, dtype=torch.uint8).untyped_storage()))
        assert live.live_bytes == _KIB and clock.stall_seconds == pytest.approx(1)


def test_what_is_not_written_yet_comes_back_at_once() -> None:
    clock = _clock()
    link = Link(clock, _KIB)
    source = torch.empty(_KIB, dtype=torch.uint8).untyped_storage()
    ticket = link.put(source)
    assert link.get(ticket) is source and clock.seconds == 0


def test_backward_waits_for_the_first_and_what_was_put_before_is_read_ahead() -> None:
    clock = _clock()
    link = Link(clock, _KIB)
    tickets = [link.put(torch.empty(_KIB, dtype=torch.uint8).untyped_storage()) for _ in range(4)]
    clock.busy_seconds += 100
    link.put(torch.empty(0, dtype=torch.uint8).untyped_storage())
    before = clock.stall_seconds
    with LiveStorages() as live:
        storage = link.get(tickets[3])
        assert clock.stall_seconds - before == pytest.approx(1)
        assert live.live_bytes == 3 * _KIB  # itself, and a window of what comes next
        assert link.get(tickets[3]) is storage
        del storage
        assert live.live_bytes == 2 * _KIB
        clock.busy_seconds += 10
        link.get(tickets[2])
        assert clock.stall_seconds - before == pytest.approx(1)
