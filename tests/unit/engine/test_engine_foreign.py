"""Reading memory that may be gone: an error, never the end of the process."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cpu_rig import MIB, Rig, load

from actckpt import _C

PAGE = mmap.PAGESIZE


@pytest.fixture
def map_bytes() -> Iterator[Callable[[int, int], np.ndarray]]:
    """Make bytes whose memory ends early: `map_bytes(present, nbytes)`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    mapped: list[tuple[int, int]] = []

    def make(present: int, nbytes: int) -> np.ndarray:
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = libc.mmap(None, nbytes, protection, flags, ctypes.c_size_t(-1).value, 0)
        assert libc.munmap(address + present, nbytes - present) == 0
        mapped.append((address, present))
        return np.frombuffer((ctypes.c_byte * nbytes).from_address(address), np.uint8)

    yield make
    for address, present in mapped:
        assert libc.munmap(address, present) == 0


@pytest.mark.skipif(bool(_C.why_foreign_reads_are_plain()), reason="the system refuses process_vm_readv")
@pytest.mark.parametrize("present", [PAGE, 5 * MIB])
def test_memory_that_is_gone_is_an_error_and_gives_the_space_back(
    folder: str, map_bytes: Callable[[int, int], np.ndarray], present: int
) -> None:
    file = _C.SpillFile(folder)
    data = map_bytes(present, 8 * MIB)
    with pytest.raises(_C.OffloadError, match=r"cannot read .* KiB of a tensor .*Bad address \(errno 14\)"):
        file.write(data.ctypes.data, data.nbytes)
    assert file.stats().disk_bytes == 0
    whole = file.write(data.ctypes.data, present)
    out = np.empty(present, np.uint8)
    file.read(whole, out.ctypes.data)
    assert np.array_equal(out, data[:present])


@pytest.mark.skipif(bool(_C.why_foreign_reads_are_plain()), reason="the system refuses process_vm_readv")
def test_a_source_that_is_gone_is_handed_back_and_no_fault_of_the_disk(
    rig: Rig, map_bytes: Callable[[int, int], np.ndarray]
) -> None:
    data = map_bytes(PAGE, 8 * MIB)
    ticket = rig.put(data)
    rig.engine.flush()
    assert load(ticket) is data
    figures = rig.engine.stats()
    assert (figures.num_failed_writes, figures.num_gone_sources, figures.last_error) == (1, 1, "")


_SANDBOX = """
    import ctypes, sys
    import numpy as np
    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]
    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_uint16), ("filters", ctypes.POINTER(Filter))]
    filters = (Filter * 4)(  # EPERM for that system call, everything else as it is
        Filter(0x20, 0, 0, 0), Filter(0x15, 0, 1, int(sys.argv[2])),
        Filter(6, 0, 0, 0x50001), Filter(6, 0, 0, 0x7FFF0000),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.addressof(Program(4, filters)), 0, 0):
        print("no sandbox here")
        sys.exit()
    from actckpt import _C
    from actckpt.doctor import examine

    file = _C.SpillFile(sys.argv[1])
    data, out = np.arange(6 << 20, dtype=np.uint8), np.zeros(6 << 20, np.uint8)
    file.read(file.write(data.ctypes.data, data.nbytes), out.ctypes.data)
    assert np.array_equal(data, out)
    print(dict(examine(measure=False))["memory freed by C++"])
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="needs the number of a system call")
def test_where_a_sandbox_refuses_bytes_are_right_and_doctor_tells(folder: str) -> None:
    number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
    command = [sys.executable, "-c", textwrap.dedent(_SANDBOX), folder, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    if "no sandbox here" in done.stdout:
        pytest.skip("the system takes no filter of system calls")
    assert done.stdout.startswith("may crash a copy under way: process_vm_readv of this process fails: Operation not")
