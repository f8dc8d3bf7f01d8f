"""All that is measured on a GPU, in one command: unattended, at most nine minutes, what is worth most first.

    python benchmarks/gpu_run.py --out DIR

Needs torch with a GPU, NumPy, pytest and a compiler. Each part is a process with a time limit of its own (`--parts`
chooses). Its rows go to DIR/PART.jsonl as they are measured, the plans that ran to DIR/plans, their costs included, and
DIR/result.json has all rows, with each part's output and error. Libraries that are not installed are named in rows.
Where matplotlib is installed, DIR/PART.svg shows peak and step time of a part's methods (`frontier_pictures.py`).

build             the extension
link              bandwidths of a loop of copies and ours, over pinned memory and disk
capped            budgets in a process that may not allocate more; steps for which memory is short
gpu_tests         tests/gpu
contract_tests    a sample of the contract tests, on the GPU
llama             8 blocks of the shape of Llama 3 8B's, 8,192 tokens: torch, other libraries, and budgets, in turns
llama_compiled    the same with compiled blocks
long_context      32k, 64k and 128k tokens in 70 GiB
llama_8b          8B parameters with AdamW: tokens per second, share of the device's FLOP/s
vit, llama_2k     smaller blocks
transformer_engine  blocks in bfloat16 and FP8, with fused attention
cuda_graphs       captured steps of a small ViT: plain, recomputed, under a plan
moe               a mixture of experts
gradients         of every plan that ran, with deterministic kernels, beside plain ones

A row has peaks of the allocator, allocated and reserved, milliseconds of host and device, joules (where `nvidia-ml-py`
finds a counter), versions, and microseconds of an idle dispatch mode and of a kernel's launch. --rehearse runs all
parts at toy size on the simulated accelerator of the tests, where computing takes no time.
"""

from __future__ import annotations

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

from frontier_pictures import draw_parts

_BENCHMARKS = Path(__file__).parent
_ROOT = _BENCHMARKS.parent
_OUTPUT_CHARACTERS = 6000
#: All parts together, and more than their limits: the last one has its time even if those before it hang.
_SECONDS = 9 * 60
#: A part of a rehearsal. It ends what hangs; a busy machine or a slow compiler is no failure.
_REHEARSAL_SECONDS = 60 * 60
#: Until the end of a part: no row begins later.
_RESERVE_SECONDS = 8
#: Seconds of the parts of `gpu_parts`.
_MEASUREMENTS = (
    {"link": 20, "capped": 35},
    {
        "llama": 74,
        "llama_compiled": 68,
        "long_context": 56,
        "llama_8b": 50,
        "vit": 25,
        "llama_2k": 20,
        "transformer_engine": 30,
        "cuda_graphs": 22,
        "moe": 20,
        "gradients": 22,
    },
)


class Part(NamedTuple):
    """A process to run.

    Attributes:
        name: of the part and its files.
        command: the words of the command line; `{out}` is the folder of the results.
        seconds: the process is ended after them.
    """

    name: str
    command: Sequence[str]
    seconds: float


def parts(*, is_rehearsal: bool) -> Iterator[Part]:
    """Yield all parts, those of most value first."""
    for part in _parts(is_rehearsal):
        yield part._replace(seconds=_REHEARSAL_SECONDS) if is_rehearsal else part


def _parts(is_rehearsal: bool) -> Iterator[Part]:
    first, others = _MEASUREMENTS
    # A rehearsal takes the extension as it is, and compiles the simulated device.
    taken = "import sys; sys.path[:0] = ['tests', '.']; import sim.device, actckpt._C as built; print(built.__file__)"
    build = ["-c", taken] if is_rehearsal else ["setup.py", "-q", "build_ext", "--inplace"]
    yield Part("build", [sys.executable, *build], 40)
    for name, seconds in first.items():
        yield _measurement(name, seconds, is_rehearsal)
    pytest = [sys.executable, "-m", "pytest", "-q", "-rs", "--tb=short"]
    if importlib.util.find_spec("xdist") and not is_rehearsal:
        pytest += ["-n", "8", "-p", "no:benchmark"]
    yield Part("gpu_tests", [*pytest, "tests/gpu"], 35)
    few = ["--device", "sim", "tests/contract/test_rescue.py"]
    sample = ["--device", "cuda", "--sample", "16", "--programs", "20", "tests/contract"]
    yield Part("contract_tests", [*pytest, *(few if is_rehearsal else sample)], 20)
    for name, seconds in others.items():
        yield _measurement(name, seconds, is_rehearsal)


def _measurement(name: str, seconds: float, is_rehearsal: bool) -> Part:
    last_row = (_REHEARSAL_SECONDS if is_rehearsal else seconds) - _RESERVE_SECONDS
    command = [sys.executable, "-m", "gpu_parts", name, "--out", "{out}", "--seconds", str(last_row)]
    return Part(name, command + ["--rehearse"] * is_rehearsal, seconds)


def run_part(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a part, no longer than `seconds`; return its rows, and what went wrong."""
    command = [word.replace("{out}", str(folder)) for word in part.command]
    start = time.monotonic()
    result: dict[str, Any] = {"command": command}
    try:
        result |= _run_process(command, seconds)
    except OSError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result["seconds"] = round(time.monotonic() - start, 1)
    rows = folder / f"{part.name}.jsonl"
    if rows.exists():
        result["rows"] = _read_rows(rows.read_text())
    return result


def _read_rows(text: str) -> dict[str, Any]:
    """Return rows by name. The last line may be cut, if its process was ended."""
    lines = [line.removesuffix("\n") for line in text.splitlines(keepends=True) if line.endswith("\n")]
    rows = [json.loads(line) for line in lines]
    return {row.pop("row"): row for row in rows}


def _run_process(command: Sequence[str], seconds: float) -> dict[str, Any]:
    paths = [str(_ROOT), str(_BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    status = None
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    result = {"exit_status": status, "output": output[-_OUTPUT_CHARACTERS:]}
    if status is None:
        result["error"] = f"ended after {seconds:.0f} s, its time limit"
    elif status != 0:
        lines = output.strip().splitlines() or ["no output"]
        result["error"] = f"exit status {status}: {lines[-1]}"
    return result


def run(all_parts: Sequence[Part], folder: Path, seconds: float) -> list[str]:
    """Run parts, and write DIR/result.json after each; return the names of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    results: dict[str, dict[str, Any]] = {}
    for part in all_parts:
        left = end - time.monotonic()
        result: dict[str, Any] = {"error": "skipped: out of time"}
        if left > 1:
            result = run_part(part, folder, min(part.seconds, left))
        results[part.name] = result
        (folder / "result.json").write_text(json.dumps({"parts": results}, indent=1) + "\n")
        print(f"{part.name}: {result.get('error', 'done')} ({result.get('seconds', 0)} s)", flush=True)
    return [name for name, result in results.items() if "error" in result]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rehearse", action="store_true", help="at toy size on the simulated accelerator of the tests")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these")
    args = parser.parse_args()
    known = list(parts(is_rehearsal=args.rehearse))
    names = [part.name for part in known]
    if unknown := set(args.parts or ()) - set(names):
        parser.error(f"--parts has unknown {sorted(unknown)}. Known are {', '.join(names)}.")
    chosen = [part for part in known if args.parts is None or part.name in args.parts]
    seconds = sum(part.seconds for part in chosen) if args.rehearse else _SECONDS
    failed = run(chosen, args.out.resolve(), seconds)
    result = args.out / "result.json"
    print(f"Wrote {result}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if importlib.util.find_spec("matplotlib"):
        print("Drew", *draw_parts(json.loads(result.read_text())["parts"], args.out))
    else:
        print(f"No pictures without matplotlib: run benchmarks/frontier_pictures.py {result} where it is installed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
