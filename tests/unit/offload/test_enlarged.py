"""C++ that enlarges a tensor frees its memory while a worker reads it: no crash, no wrong number.

In a process of its own, since reading unmapped memory would end it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import sim

_PROGRAM = """
    import json, sys, time, warnings
    import torch, actckpt
    sys.path.insert(0, sys.argv[4])
    import sim
    from actckpt import config
    from actckpt import _C
    from actckpt._offload import stores

    folder, num_workers, is_taken = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "taken"
    warnings.simplefilter("ignore")  # torch warns of outputs that grow
    assert _C.fix_mmap_threshold(1 << 20)  # memory that is freed is unmapped
    ROWS = 3 << 20  # more than a bounce buffer: the rest is read once the first write goes on
    LARGER = 2 * ROWS
    WAYS = {
        "resize_": lambda h: h.resize_(LARGER),
        "out=": lambda h: torch.ones(LARGER, out=h),
        "set_": lambda h: h.set_(torch.ones(5)),  # frees nothing
        "data.resize_": lambda h: h.data.resize_(LARGER),  # with a version counter of its own: h is as it was
        "alias": lambda h: torch.empty(0).set_(h.untyped_storage()).resize_(LARGER),
    }

    def outcome_of(change):
        io, faults = sim.FaultyFileIo(), sim.Faults()
        faults.hold_writes = True
        io.set(faults)
        store = sim.disk_store(folder, io, num_workers=num_workers)
        stores._stores["cpu"] = config.generation, store
        x, h = torch.randn(ROWS, requires_grad=True), torch.full((ROWS,), 2.0)
        with actckpt.offload(min_bytes=0):
            y = x * h
        while num_workers and not io.num_held:
            time.sleep(0.001)
        change(h)
        others = [torch.full((ROWS,), 7.0) for _ in range(3)] if is_taken else []  # at the address that h had
        io.set(sim.Faults())
        store.flush()
        figures = store.stats()
        try:
            (gradient,) = torch.autograd.grad(y.sum(), x)
            outcome = "right" if torch.equal(gradient, torch.full((ROWS,), 2.0)) else "wrong"
        except actckpt.errors.SavedTensorChangedError:
            outcome = "raises"
        return outcome, figures.num_gone_sources, figures.num_failed_writes

    print(json.dumps({how: outcome_of(change) for how, change in WAYS.items()}))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("memory", ["unmapped", "taken"])
def test_memory_that_cpp_frees_under_a_copy_is_no_crash_and_no_wrong_number(
    tmp_path: Path, memory: str, num_workers: int
) -> None:
    arguments = [str(tmp_path), str(num_workers), memory, str(Path(sim.__file__).parents[1])]
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "spill file" not in done.stderr, "nobody says that the disk fails"
    found = json.loads(done.stdout)
    outcomes = {how: outcome for how, (outcome, _, _) in found.items()}
    assert outcomes == {
        "resize_": "raises",
        "out=": "raises",
        "set_": "raises",
        "data.resize_": "right",
        "alias": "right",
    }
    if memory == "unmapped":  # no worker found bytes there
        assert {how: gone for how, (_, *gone) in found.items()} == {how: [how != "set_"] * 2 for how in found}
