"""Where the system refuses threads: fewer copy, or callers do, and the log says so."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

#: A thread needs a stack of this size; the process is not allowed as much memory.
STACK_BYTES = 1 << 30
#: glibc reads the limit when the program begins.
LIMITED = (
    "import resource, sys, os\n"
    f"resource.setrlimit(resource.RLIMIT_STACK, ({STACK_BYTES}, resource.RLIM_INFINITY))\n"
    "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])\n"
)
#: Takes `num_threads` pieces of address space the size of a stack out of what is left.
LIMIT = (
    "import resource, os\n"
    "used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGESIZE')\n"
    f"resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29) + NUM_THREADS * {STACK_BYTES}, -1))\n"
)

OFFLOAD = (
    "import torch, actckpt, logging\n"
    "logging.basicConfig(format='%(message)s')\n"
    "x = torch.randn(1 << 19, requires_grad=True)\n"
    "expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]\n" + LIMIT + "actckpt.configure(num_workers=2)\n"
    "with actckpt.offload(min_bytes=0):\n"
    "    y = x.exp().sin()\n"
    "assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)\n"
    "assert actckpt.stats().offloaded_bytes > 0\n"
)


def _run(script: str, num_threads: int) -> subprocess.CompletedProcess[str]:
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the size of stacks is limited here")
    script = script.replace("NUM_THREADS", str(num_threads))
    return subprocess.run([sys.executable, "-c", LIMITED, script], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("num_threads", "words"),
    [
        (0, "Only 0 of 2 threads to copy to the spill file could be made: Resource temporarily unavailable (errno 11). "
         "Callers copy, once bounce buffers are full. Raise the limit of threads"),
        (1, "Only 1 of 2 threads to copy to the spill file could be made: Resource temporarily unavailable (errno 11). "
         "They copy all. Raise the limit of threads"),
    ],
)  # fmt: skip
def test_fewer_threads_than_asked_for_copy_all_the_same_and_the_log_says_so(num_threads: int, words: str) -> None:
    done = _run(OFFLOAD, num_threads)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(words) == 1, done.stderr
