"""A disk that fills, fails or lies; limits; bad input; nothing is left: never a wrong number."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from internals.stores import (
    faults,
    faulty_store,
    flush,
    live_tickets,
    store_on_disk,
    using,
)
from offload_oracle import deep
from oracle import leaf

import actckpt
from actckpt.errors import OffloadError, OffloadReadError

SIZE = 64  # 64 * 64 float32: 16 KiB per tensor
TENSOR_BYTES = SIZE * SIZE * 4


def _expected(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(deep(x), x)[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("position", [0, 5000, TENSOR_BYTES, 2 * TENSOR_BYTES + 1, 4 * TENSOR_BYTES - 1])
def test_a_write_that_fails_keeps_the_tensor(tmp_path: Path, position: int, code: int, num_workers: int) -> None:
    x = leaf(SIZE, SIZE)
    with faulty_store(tmp_path, num_workers=num_workers) as io:
        actckpt.reset_stats()
        io.set(faults(fail_write_at=position, write_errno=code))
        for _ in range(2):
            with actckpt.offload(min_bytes=0):
                y = deep(x)
            flush()
            assert actckpt.stats().failed_writes > 0
            assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], _expected(x))
            assert torch.equal(torch.autograd.grad(y, x)[0], _expected(x))
        del y
        assert actckpt.stats().store_bytes == 0 and live_tickets() == 0


@pytest.mark.parametrize("step", [512, 4096, 5000])
def test_short_writes_and_reads_are_continued(tmp_path: Path, step: int) -> None:
    x = leaf(SIZE, SIZE)
    with faulty_store(tmp_path) as io:
        io.set(faults(max_write_bytes=step, max_read_bytes=step))
        with actckpt.offload(min_bytes=0):
            y = deep(x)
        flush()
        try:
            (grad,) = torch.autograd.grad(y, x)
        except OffloadError as error:  # a step below the alignment of direct reads
            assert step < 4096 and "offset" in str(error)
        else:
            assert torch.equal(grad, _expected(x))


_READS: dict[str, tuple[dict[str, int], str]] = {
    **{
        f"altered at {position}": ({"alter_read_at": position}, r"{folder}.*offset.*checksum|{folder}.*0x")
        for position in (0, 4095, TENSOR_BYTES + 7, 3 * TENSOR_BYTES - 1)
    },
    "failing": ({"fail_read_at": 0, "read_errno": errno.EIO}, "offset"),
    "short": ({"end_of_file_at": 5000}, "offset"),
}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("kind", _READS)
def test_a_read_that_fails_raises_and_the_next_try_is_right(tmp_path: Path, kind: str, accumulates: bool) -> None:
    """Also of what is read ahead: it raises once it is needed."""
    values, message = _READS[kind]
    x = leaf(SIZE, SIZE)
    with faulty_store(tmp_path) as io:
        with actckpt.offload(min_bytes=0):
            y = deep(x)
        flush()
        io.set(faults(**values))
        for _ in range(2):
            with pytest.raises(OffloadReadError, match=message.format(folder=tmp_path)):
                y.backward(retain_graph=True) if accumulates else torch.autograd.grad(y, x, retain_graph=True)
        assert x.grad is None
        io.set(faults())
        assert torch.equal(torch.autograd.grad(y, x)[0], _expected(x))
        del y
        assert actckpt.stats().store_bytes == 0 and live_tickets() == 0


@pytest.mark.parametrize("limit", [0, 4096, TENSOR_BYTES, 2 * TENSOR_BYTES + 100, 1 << 30])
def test_the_disk_limit_is_never_exceeded(tmp_path: Path, limit: int) -> None:
    x = leaf(SIZE, SIZE)
    with using(store_on_disk(str(tmp_path), limit_bytes=limit)):
        actckpt.reset_stats()
        for _ in range(3):
            with actckpt.offload(min_bytes=0):
                y = deep(x)
            flush()
            assert actckpt.stats().store_bytes <= limit
            assert torch.equal(torch.autograd.grad(y, x)[0], _expected(x))
        assert actckpt.stats().peak_store_bytes <= limit
        assert (actckpt.stats().kept_full > 0) == (limit < 4 * TENSOR_BYTES)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("window", [0, 1, TENSOR_BYTES, 3 * TENSOR_BYTES])
def test_bytes_in_flight_stay_within_the_window_and_one_tensor(tmp_path: Path, window: int, num_workers: int) -> None:
    x = leaf(SIZE, SIZE)
    with using(store_on_disk(str(tmp_path), window_bytes=window, num_workers=num_workers)):
        for _ in range(3):
            with actckpt.offload(min_bytes=0):
                y = deep(x)
            assert torch.equal(torch.autograd.grad(y, x)[0], _expected(x))
        assert actckpt.stats().peak_inflight_bytes <= window + TENSOR_BYTES


def test_sources_that_are_still_being_written_are_used_as_they_are(tmp_path: Path) -> None:
    x = leaf(SIZE, SIZE)
    with faulty_store(tmp_path) as io:
        io.set(faults(hold_writes=True))
        with actckpt.offload(min_bytes=0):
            y = deep(x)
        assert torch.equal(torch.autograd.grad(y, x)[0], _expected(x))
        io.set(faults())
        del y
        flush()
        assert actckpt.stats().store_bytes == 0


# Bad input.


def test_a_folder_that_vanishes_later_is_an_engine_error_at_the_first_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    before = actckpt.configure().spill_dir
    actckpt.configure(spill_dir=folder)
    folder.rmdir()
    with actckpt.offload(min_bytes=0), pytest.raises(OffloadError, match="spill_dir"):
        (leaf(4) * 1).sin()
    actckpt.configure(spill_dir=before)
    with actckpt.offload(min_bytes=0):
        y = (leaf(4) * 1).sin().sum()
    y.backward()


def test_host_without_an_accelerator_is_refused() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(ValueError, match=r"none here.*'disk' or 'auto'"):
        actckpt.offload("host")
