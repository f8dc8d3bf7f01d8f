"""All that is measured on a GPU, in one command: unattended, at most nine minutes, those of most value first.

    python benchmarks/gpu_suite.py --out DIR

Needs torch with a GPU, NumPy, pytest and a compiler. Builds the extension; then bandwidths, training at 8192 tokens
with every method beside the others (overlap of copies, peaks beside their bounds), the tests of tests/gpu, training
under budgets, training at 32768 tokens, and TransformerEngine where it imports. Each part is a process with a time
limit of its own, and writes DIR/NAME.json when it ends: its output, what it measured, and what went wrong, if anything
did; then the next one runs.
--rehearse runs the same at toy size on the simulated accelerator of the tests, without hardware, each part for an hour
at most: the extension is taken as it is, the simulated device is compiled, the tests of tests/gpu are skipped one by
one, and TransformerEngine measures nothing.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[1]
_BENCHMARKS = Path(__file__).parent
_OUTPUT_CHARACTERS = 6000
#: All parts together, and more than their limits: the last one has its time even where those before it hang.
_SECONDS = 9 * 60
#: A part of a rehearsal. It ends what hangs; a busy machine or a slow compiler is no failure.
_REHEARSAL_SECONDS = 60 * 60


class Part(NamedTuple):
    """A process to run."""

    name: str
    #: What it measures is read from a file: where it writes that, the command has `{result}`.
    command: Sequence[str]
    #: It is ended after so long.
    seconds: float


def parts(*, rehearses: bool) -> Iterator[Part]:
    """Yield all parts, those of most value first."""
    for part in _parts(rehearses):
        yield part._replace(seconds=_REHEARSAL_SECONDS) if rehearses else part


def _parts(rehearses: bool) -> Iterator[Part]:
    python = sys.executable

    def offload(name: str, sections: str, tokens: int, toy_tokens: int, seconds: float) -> Part:
        command = [python, str(_BENCHMARKS / "gpu_offload.py"), "--sections", sections, "--out", "{result}"]
        command += ["--minutes", f"{((_REHEARSAL_SECONDS if rehearses else seconds) - 10) / 60:.2f}"]
        toy = ["--rehearse", "--layers", "6", "--tokens", str(toy_tokens), "--steps", "3"]
        return Part(name, command + (toy if rehearses else ["--tokens", str(tokens)]), seconds)

    taken = "import sys; sys.path[:0] = ['tests', '.']; import sim.device, actckpt._C as built; print(built.__file__)"
    build = ["-c", taken] if rehearses else ["setup.py", "-q", "build_ext", "--inplace"]
    yield Part("build", [python, *build], 75)
    yield offload("bandwidth", "copies, pinned", 8192, 64, 30)
    yield offload("frontier", "frontier", 8192, 64, 95)
    yield _budgets(rehearses, 130)
    side_by_side = ["-n", "8", "-p", "no:benchmark"] if importlib.util.find_spec("xdist") and not rehearses else []
    yield Part("tests", [python, "-m", "pytest", "tests/gpu", "-q", "-rs", "--tb=short", *side_by_side], 95)
    yield offload("long_context", "training", 32768, 128, 45)
    te = [
        python,
        str(_BENCHMARKS / "gpu_te.py"),
        "--no-tests",
        "--layers",
        "4",
        "--minutes",
        "0.6",
        "--out",
        "{result}",
    ]
    yield Part("transformer_engine", te, 45)
    yield offload("disk", "copies, disk", 8192, 64, 20)


def _budgets(rehearses: bool, seconds: float) -> Part:
    command = [sys.executable, str(_BENCHMARKS / "gpu_budgets.py"), "--out", "{result}"]
    command += ["--minutes", f"{((_REHEARSAL_SECONDS if rehearses else seconds) - 15) / 60:.2f}", "--budgets"]
    toy = ["2", "--rehearse", "--few-budgets", "1", "--rounds", "1"]
    return Part("budgets", command + (toy if rehearses else ["7", "--rounds", "4"]), seconds)


def measured(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a part, no longer than so many seconds, and return what is to be written about it."""
    result = folder / f"{part.name}.part"
    command = [word.replace("{result}", str(result)) for word in part.command]
    begin = time.monotonic()
    found: dict[str, Any] = {"part": part.name, "command": command}
    try:
        found |= _ran(command, seconds)
    except OSError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["seconds"] = round(time.monotonic() - begin, 1)
    if result.exists():
        try:
            found["result"] = json.loads(result.read_text())
        except ValueError as error:  # it was ended while it wrote
            found.setdefault("error", f"what it measured cannot be read: {error}")
        result.unlink()
    return found


def _ran(command: Sequence[str], seconds: float) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    status = None
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    found = {"exit_status": status, "output": said[-_OUTPUT_CHARACTERS:]}
    if status is None:
        found["error"] = f"ended after {seconds:.0f} s, its time limit"
    elif status != 0:
        lines = said.strip().splitlines() or ["no output"]
        found["error"] = f"exit status {status}: {lines[-1]}"
    return found


def run(all_parts: Sequence[Part], folder: Path, seconds: float) -> list[str]:
    """Run parts and write what each gave to a file of its name; return the names of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + seconds, []
    for part in all_parts:
        left = end - time.monotonic()
        found: dict[str, Any] = {"part": part.name, "error": "skipped: out of time"}
        if left > 1:
            found = measured(part, folder, min(part.seconds, left))
        (folder / f"{part.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{part.name}: {found.get('error', 'done')} ({found.get('seconds', 0)} s)", flush=True)
        if "error" in found:
            failed.append(part.name)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rehearse", action="store_true", help="at toy size on the simulated accelerator of the tests")
    parser.add_argument("--parts", nargs="+", help="only these")
    args = parser.parse_args()
    chosen = [part for part in parts(rehearses=args.rehearse) if args.parts is None or part.name in args.parts]
    if unknown := set(args.parts or ()) - {part.name for part in chosen}:
        known = ", ".join(part.name for part in parts(rehearses=args.rehearse))
        parser.error(f"--parts has unknown {sorted(unknown)}. Known are {known}.")
    seconds = sum(part.seconds for part in chosen) if args.rehearse else _SECONDS
    failed = run(chosen, args.out.resolve(), seconds)
    print(f"Wrote {len(chosen)} files to {args.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
