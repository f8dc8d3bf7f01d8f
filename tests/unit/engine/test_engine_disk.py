"""What the header of the spill file promises; the disk misbehaves through FaultyFileIo."""

from __future__ import annotations

import errno
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cpu_rig import MIB, Make, Rig

from actckpt import _C


def read(file: _C.SpillFile, block: _C.SpillBlock) -> np.ndarray:
    out = np.zeros(block.nbytes, np.uint8)
    file.read(block, out.ctypes.data)
    return out


def write(file: _C.SpillFile, data: np.ndarray) -> _C.SpillBlock:
    return file.write(data.ctypes.data, data.nbytes)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [0, 1, 511, 4095, 4096, 4097, 4 * MIB, 9 * MIB + 13])
def test_bytes_come_back_whatever_size_and_alignment(folder: str, make_bytes: Make, nbytes: int, direct: bool) -> None:
    file = _C.SpillFile(folder, direct=direct)
    data = make_bytes(nbytes + 3)[3:]
    assert np.array_equal(read(file, write(file, data)), data)


def test_the_file_has_no_name(folder: str, make_bytes: Make) -> None:
    file = _C.SpillFile(folder)
    write(file, make_bytes(MIB))
    assert os.listdir(folder) == []


def test_many_blocks_freed_and_rewritten_in_any_order(folder: str, make_bytes: Make) -> None:
    rng = random.Random(4)
    file = _C.SpillFile(folder)
    blocks: list[tuple[_C.SpillBlock, np.ndarray]] = []
    for _ in range(200):
        if blocks and rng.random() < 0.5:
            block, data = blocks.pop(rng.randrange(len(blocks)))
            assert np.array_equal(read(file, block), data)
            block.free()
        else:
            data = make_bytes(rng.randrange(1, 300_000))
            blocks.append((write(file, data), data))
    for block, data in blocks:
        assert np.array_equal(read(file, block), data)
    assert file.stats().file_bytes == file.stats().peak_disk_bytes


def test_limit_holds_and_the_error_names_both_numbers(folder: str, make_bytes: Make) -> None:
    file = _C.SpillFile(folder, limit_bytes=2 * MIB)
    block = write(file, make_bytes(MIB + 1))
    with pytest.raises(_C.OffloadError, match=r"1\.0 MiB.*limit 2\.0 MiB, in use 1\.0 MiB"):
        write(file, make_bytes(MIB))
    block.free()
    write(file, make_bytes(2 * MIB))


def test_a_disk_that_accepts_nothing_is_an_error_and_no_hang(rig: Rig, make_bytes: Make) -> None:
    rig.faults(max_write_bytes=100)
    with pytest.raises(_C.OffloadError, match="no byte is accepted"):
        write(rig.file, make_bytes(MIB))


def test_a_full_file_system_is_an_error_not_a_loss(folder: str, make_bytes: Make) -> None:
    """The real thing: the kernel's file size limit makes a write short, then refuses the rest."""
    script = (
        "import resource, signal, sys, numpy as np\n"
        "from actckpt import _C\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "file = _C.SpillFile(sys.argv[1])\n"
        "data = np.ones(3 << 20, np.uint8)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    file.write(data.ctypes.data, data.nbytes)\n"
        "except _C.OffloadError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert f"errno {errno.EFBIG}" in done.stdout and str(1 << 20) in done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_missing_or_unwritable_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(_C.OffloadError, match=r"'.*nowhere': No such file.*spill_dir"):
        _C.SpillFile(str(tmp_path / "nowhere"))
    with pytest.raises(_C.OffloadError):
        _C.SpillFile("/proc")


def test_memory_file_systems_are_recognised(folder: str) -> None:
    if os.path.ismount("/dev/shm"):
        assert _C.is_memory_folder("/dev/shm")
    assert not _C.is_memory_folder("/proc")
    assert not _C.is_memory_folder("/nowhere")


def test_blocks_of_another_file_are_refused(folder: str, make_bytes: Make) -> None:
    one, other = _C.SpillFile(folder), _C.SpillFile(folder)
    with pytest.raises(_C.OffloadError, match="another spill file"):
        read(other, write(one, make_bytes(10)))


def test_descriptors_are_closed(folder: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        _C.SpillFile(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_checksum_is_xxh64(folder: str) -> None:
    """Published values of the empty string, 'a', 'abc' and the 39-byte sentence."""
    file = _C.SpillFile(folder)
    for text, value in {
        b"": 0xEF46DB3751D8E999,
        b"a": 0xD24EC4F1A98C6E5B,
        b"abc": 0x44BC2CF5AD770999,
        b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
    }.items():
        assert write(file, np.frombuffer(text, np.uint8)).checksum == value
