"""Everything a change must pass, two suites at a time.

Builds first; then all that runs in one process, two suites beside each other: lint, types, the documentation's site,
sdist and wheel, which trains in an empty environment, the tests with the simulated device, the engine's C++ tests under
the sanitizers, code of other libraries, TransformerEngine's Python code on the CPU, the newest torch; then what takes
two processes, one after the other: two ranks, and the other tests. What a suite says lies in build/ci/NAME.log, and is
printed in one piece when it ends. The table at the end tells what each took; one that took far more than its share
fails, too (CONTRIBUTING.md, "Shares of time").

Tests run in an order that follows from the files of the commit: each commit has another one, and a failure repeats. So
do random programs, and a part of the cases: of each test that trains at least one. `make test` runs all of them.
"""

import os
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_LOGS = _ROOT / "build" / "ci"
_AT_A_TIME = 2
#: A suite fails above so many times its share.
_FACTOR = 3


class Suite(NamedTuple):
    """Commands of the shell that pass or fail together."""

    name: str
    #: Minutes on two cores: half of the CPU time, which does not depend on what else runs.
    share: float
    commands: str


class Result(NamedTuple):
    """What became of a suite."""

    suite: Suite
    status: int
    seconds: float
    cpu_seconds: float

    @property
    def minutes(self) -> float:
        """What counts toward the share."""
        return self.cpu_seconds / 2 / 60

    @property
    def verdict(self) -> str:
        if self.status != 0:
            return f"FAILED ({self.status})"
        return "passed" if self.minutes <= _FACTOR * self.suite.share else "TOO LONG"


#: Suites of a stage run beside each other, so long ones come first; where one fails, the next stage does not begin.
STAGES = (
    (Suite("build", 2, "make build"),),
    (
        Suite("device", 5, 'make device WORKERS=0 ARGS="$ORDER --sample 8"'),
        Suite("lint and types", 1, "make lint types"),
        Suite("docs", 1, "make docs"),
        Suite("package", 1, "make wheels"),
        Suite("sanitizers", 3, "make sanitize"),
        Suite("integrations", 3, 'make integrations ARGS="$ORDER --sample 2"'),
        Suite("TransformerEngine", 2, 'make te ARGS="$ORDER --sample 3"'),
        Suite("newest torch", 3, 'make newest ARGS="$ORDER"'),
    ),
    (Suite("distributed", 2, 'make distributed ARGS="$ORDER --sample 2"'),),
    (Suite("tests", 8, 'make cpu ARGS="$ORDER --sample 4 --programs 100"'),),
)


def order() -> str:
    """Return options of pytest for the order of tests."""
    seed = 0
    for path in sorted(path for folder in ("actckpt", "csrc", "tests") for path in (_ROOT / folder).rglob("*.*")):
        if path.suffix in {".py", ".cpp", ".h"}:
            seed = zlib.crc32(path.read_bytes(), seed)
    return f"--seed {seed % 2**16}"


def run(suites: Sequence[Suite], folder: Path) -> list[Result]:
    """Run suites, two at a time; print what each said when it ends."""
    waiting, running, results = deque(suites), {}, []
    folder.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < _AT_A_TIME:
            suite = waiting.popleft()
            with (folder / f"{suite.name}.log").open("wb") as log:
                process = subprocess.Popen(["sh", "-c", suite.commands], cwd=_ROOT, stdout=log, stderr=log)
            running[process.pid] = suite, process, time.monotonic()
            print(f"== {suite.name}: {suite.commands}", flush=True)
        pid, status, usage = os.wait4(-1, 0)
        suite, process, begin = running.pop(pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = usage.ru_utime + usage.ru_stime
        results.append(Result(suite, process.returncode, time.monotonic() - begin, took))
        said = (folder / f"{suite.name}.log").read_text(errors="replace")
        print(f"{said}\n== {suite.name}: {results[-1].verdict}", flush=True)
    return results


def table(results: Sequence[Result]) -> str:
    """Return what each suite took, a line each."""
    lines = [f"{'suite':<20}{'result':<14}{'minutes':>8}{'on two cores':>14}{'share':>7}"]
    for found in results:
        took = f"{found.seconds / 60:>8.1f}{found.minutes:>14.1f}{found.suite.share:>7.1f}"
        lines.append(f"{found.suite.name:<20}{found.verdict:<14}{took}")
    return "\n".join(lines)


def main() -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a hundred processes import the same modules
    os.environ["ORDER"] = order()
    results: list[Result] = []
    begin = time.monotonic()
    for stage in STAGES:
        results += run(stage, _LOGS)
        if any(found.status != 0 for found in results):
            break
    print(table(results))
    bad = [f"{found.suite.name}: {found.verdict}" for found in results if found.verdict != "passed"]
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes; " + ("; ".join(bad) or "all passed"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
