"""What a change costs: rows of the benchmarks of two checkouts, in interleaved pairs, one process each.

    python benchmarks/compare_checkouts.py BEFORE AFTER [--rounds 60] [--warm-ups 10] [--out RESULT.json]

Both checkouts have their extension built in place. Rows: steps of 32, 8 and 1 regions with reruns and with policies;
the backward of one region whose eight operators in a row are all dropped; put and get of a small CPU tensor beyond two
copies. Each round asks both processes for the median of a few steps, in random order; a row is the median of the ratios
after / before over all rounds, with its 95 % interval (bootstrap).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_WORKER = r"""
import sys, statistics, time
root, warm_ups = sys.argv[1], int(sys.argv[2])
sys.path[:0] = [root, root + "/benchmarks"]
import torch
torch.set_num_threads(1)
import actckpt, test_offload_small as small, test_replay_overhead as replay, test_rerun_overhead as rerun
assert actckpt.__file__.startswith(root), actckpt.__file__

def timed(step):
    def run():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    return run

def row_of_eight():
    x = torch.randn(4, 16, requires_grad=True)
    def chain(h):
        for _ in range(8):
            h = h.sigmoid()
        return h
    run = replay._METHODS["actckpt, recompute all"]
    def backward():
        losses = [run(chain, x).sum() for _ in range(5)]
        start = time.perf_counter()
        for loss in losses:
            loss.backward()
        return (time.perf_counter() - start) / 5
    return backward

steps = {"replay: backward of 8 dropped operators in a row": row_of_eight()}
for num in (32, 8, 1):
    for name in ("actckpt", "actckpt, no random state", "actckpt, no early stop"):
        steps[f"rerun: {name}, {num} regions"] = timed(rerun._step_function(rerun._METHODS[name], num))
    for name in ("actckpt", "actckpt, torch's contexts", "actckpt, recompute all"):
        steps[f"replay: {name}, {num} regions"] = timed(replay._step_function(replay._METHODS[name], num))

def small_tensors(num_workers):
    def beyond_copies():
        with small._store_in_memory(num_workers):
            pair = [timed(small._step_function(small._METHODS[name])) for name in ("actckpt", "two copies")]
            for _ in range(3):
                for step in pair:
                    step()
            ours, copies = ([step() for _ in range(9)] for step in pair)
        return (statistics.median(ours) - statistics.median(copies)) / small._TENSORS
    return beyond_copies

for num_workers in (0, 2):
    steps[f"offload: put and get beyond copies, {num_workers} workers"] = small_tensors(num_workers)
for step in steps.values():
    for _ in range(warm_ups):
        step()
print(list(steps), flush=True)
for line in sys.stdin:
    print(statistics.median(steps[line.strip()]() for _ in range(5)), flush=True)
"""


def _ask(process: subprocess.Popen[str], row: str) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(row + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def _summary(before: list[float], after: list[float]) -> dict[str, Any]:
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "before_us": round(1e6 * statistics.median(before), 2),
        "after_us": round(1e6 * statistics.median(after), 2),
        "ratio": round(statistics.median(ratios), 4),
        "interval_95": [round(medians[50], 4), round(medians[1949], 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warm-ups", type=int, default=10, help="of each row, before the first round")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(checkout.resolve()), str(args.warm_ups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for checkout in args.checkouts
    ]
    before_rows, rows = (eval(process.stdout.readline()) for process in processes if process.stdout is not None)
    assert before_rows == rows
    samples: dict[str, tuple[list[float], list[float]]] = {row: ([], []) for row in rows}
    for _ in range(args.rounds):
        for row in rows:
            for index in random.sample((0, 1), 2):
                samples[row][index].append(_ask(processes[index], row))
    for process in processes:
        process.kill()
    found = {row: _summary(*pair) for row, pair in samples.items()}
    for row, each in found.items():
        low, high = each["interval_95"]
        times = f"{each['before_us']:9.1f} -> {each['after_us']:9.1f} us"
        print(f"{row:58} {times}  {each['ratio']:.3f} [{low:.3f}, {high:.3f}]")
    if args.out is not None:
        machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        content = {"machine": {**machine, "torch": torch.__version__}, "rounds": args.rounds, "rows": found}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
