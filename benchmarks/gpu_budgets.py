"""Budgets on a GPU: fifteen between the smallest and what plain training needs, for models of real size.

    python benchmarks/gpu_budgets.py --minutes 3.5 --out RESULT.json
    python benchmarks/gpu_budgets.py --models vit --budgets 8 --rounds 15

A Llama (Transformers' where it imports; hidden 4096, 8 blocks, 8192 tokens, bfloat16) trains under each budget by
`actckpt.apply(model, budget=BYTES)`: peaks by the allocator in each step, predicted peaks, what the plan does, and its
step beside a plain one, in turns. Then five of the plans in turns with each simple choice, torch's checkpoints and
Transformers' own; `actckpt.plan`, `budget="auto"` and 0.9; gradients of each plan beside those of plain training, bit
for bit; `actckpt.estimate` beside what was measured; a ViT and a UNet; and a plan with its race. `--models` names
others, of which the first has all these rows. Times are those of the device's events. The file is written again after
every row, those of most value come first, and what --minutes leave no time for is written down as skipped. --rehearse
runs the same at toy size on the simulated accelerator of the tests, where computing takes no time.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_offload
import torch
from gpu_beside import choices, estimated, same_gradients, turn
from gpu_models import MODELS, REAL, TOY, Sizes
from gpu_offload import Part, Report
from gpu_training import Bench, plain, planned, smallest, spread, trained

import actckpt
from actckpt._core import devices

#: Of the budgets, so many are compared with simple choices; `actckpt.plan` is asked for so many.
_NUM_COMPARED, _NUM_PLANNED = 5, 3
#: Steps of a plan that count, and pairs with plain ones.
_NUM_STEPS = 3

_OUT = Path(__file__).parent / "results" / "gpu_budgets.json"


def _training(bench: Bench) -> Iterator[Part]:
    """Yield the rows of a model in training."""
    yield Part(bench.name, "plain", partial(plain, bench))
    yield Part(bench.name, "smallest", partial(smallest, bench))
    for number in range(bench.num_budgets):
        keep = partial(bench.plans.__setitem__, number)
        measure = partial(trained, bench, partial(bench.budget, number), _NUM_STEPS, keep)
        yield Part(bench.name, f"budget {number + 1}", measure)


def _plans(bench: Bench) -> Iterator[Part]:
    """Yield the rows of `plan`, and of budgets that are no bytes."""
    middle = spread(0, bench.num_budgets - 1, _NUM_PLANNED + 2)[1:-1]
    for number in dict.fromkeys(middle):
        name = f"plan for budget {number + 1}"
        yield Part("other budgets", name, partial(planned, bench, name, partial(bench.budget, number), race=False))
    for given in ("auto", 0.9):
        keep = partial(bench.other_plans.__setitem__, str(given))
        measure = partial(trained, bench, lambda given=given: given, _NUM_STEPS, keep)
        yield Part("other budgets", f"budget={given!r}", measure)


def parts(
    sizes: Sizes, num_budgets: int, num_few: int, num_rounds: int, models: Sequence[str] = MODELS
) -> Iterator[Part]:
    """Yield all parts, those of most value first; of models after the first one so few budgets."""
    first, *others = models
    bench = Bench(first, sizes, num_budgets)
    yield from _training(bench)
    compared = list(dict.fromkeys(spread(0, num_budgets - 1, _NUM_COMPARED)))
    yield from choices(bench, compared)
    for number in range(num_rounds):
        yield Part("in turns", f"round {number + 1}", partial(turn, bench, compared))
    yield from _plans(bench)
    for number in compared:
        name = f"budget {number + 1}"
        yield Part("gradients", name, partial(same_gradients, bench, partial(bench.plans.__getitem__, number)))
    for name in list(bench.other_plans):
        yield Part("gradients", name, partial(same_gradients, bench, partial(bench.other_plans.__getitem__, name)))
    yield Part("estimate", first, partial(estimated, bench))
    bench.forget()
    for name in others:
        other = Bench(name, sizes, num_few)
        yield from _training(other)
        other.forget()
    again = Bench(first, sizes, num_budgets)
    again.plain_bytes, again.smallest_bytes = bench.plain_bytes, bench.smallest_bytes
    raced = partial(planned, again, "raced", partial(again.budget, num_budgets // 2), race=True)
    yield Part("other budgets", f"plan with a race for budget {num_budgets // 2 + 1}", raced)


def _run(args: argparse.Namespace, sizes: Sizes) -> int:
    deadline = time.monotonic() + 60 * args.minutes
    faulthandler.dump_traceback_later(60 * args.minutes + 60, exit=True)  # the file has what is known by then
    about: dict[str, Any] = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": {"gpu": gpu_offload.device_name(), "system": platform.platform(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "actckpt": actckpt.__version__},
        "sizes": {name: str(value) for name, value in sizes._asdict().items()},
    }
    report = Report(args.out, about)
    report.run(parts(sizes, args.budgets, args.few_budgets, args.rounds, args.models), deadline)
    faulthandler.cancel_dump_traceback_later()
    print(f"Wrote {args.out}" + (f"; failed: {', '.join(report.failed)}" if report.failed else ""))
    return 1 if report.failed else 0


def main() -> int:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms want
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, default=15)
    parser.add_argument("--few-budgets", type=int, default=5, help="of models after the first")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="the first has all rows")
    parser.add_argument("--rounds", type=int, default=8, help="of plans and simple choices in turns")
    parser.add_argument("--minutes", type=float, default=3.5, help="begins no part after that")
    parser.add_argument("--rehearse", action="store_true", help="at toy size on the simulated accelerator of the tests")
    parser.add_argument("--out", type=Path, default=_OUT)
    args = parser.parse_args()
    if min(args.budgets, args.few_budgets, args.rounds) < 1 or args.minutes <= 0:
        parser.error("--budgets, --few-budgets and --rounds must be at least 1, --minutes positive")
    if args.rehearse:
        import rehearsal

        with rehearsal.simulated():
            accelerator = devices.available()
            assert accelerator is not None
            gpu_offload.use(accelerator, TOY.llama)
            return _run(args, TOY)
    if devices.available() is None:
        print("gpu_budgets: no GPU, nothing measured.")
        return 0
    return _run(args, REAL)


if __name__ == "__main__":
    sys.exit(main())
