r"""What recording an operator would cost in torch's dispatcher: CPU time of forward over plain, per operator.

    python benchmarks/dispatcher_recorder.py --out benchmarks/results/dispatcher_recorder_MACHINE_DATE.json

The recorder is a boxed fallback below autograd, in C++ against torch's own headers, compiled in some two minutes. It
runs operators, then also copies their arguments, then also notes which values they read and make. Beside it: a dispatch
mode that does nothing, and actckpt. Model: "gpt2 thin" of `recording.py`; one thread. Methods run in turns; figures are
medians and quartiles over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from recording import SHAPES, Transformer, num_operators
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import actckpt

# No key is meant for this use. This one is torch's, which may use or move it.
_SOURCE = """
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
constexpr auto kKey = c10::DispatchKey::Fake;
struct Step { c10::OperatorHandle op; std::vector<c10::IValue> args; std::vector<int64_t> reads, makes; };
struct Tape {
  int64_t level, operators = 0;
  std::vector<std::unique_ptr<Step>> steps;
  std::unordered_map<const void*, int64_t> values;  // by storage
};
thread_local std::unique_ptr<Tape> tape;
void note(const c10::IValue& value, std::vector<int64_t>& into) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage()) {
    const void* storage = value.toTensor().storage().unsafeGetStorageImpl();
    const auto number = tape->values.try_emplace(storage, tape->values.size()).first->second;
    into.push_back(number << 32 | value.toTensor()._version());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) note(tensor, into);
  }
}
void recorded(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  const c10::impl::ExcludeDispatchKeyGuard kernels(kKey);
  if (tape) ++tape->operators;
  if (!tape || tape->level == 0) return op.redispatchBoxed(below, stack);
  const auto first = stack->end() - op.schema().arguments().size();
  auto step = std::make_unique<Step>(Step{op, {first, stack->end()}, {}, {}});
  if (tape->level == 2) for (const auto& value : step->args) note(value, step->reads);
  op.redispatchBoxed(below, stack);
  const auto results = stack->end() - op.schema().returns().size();
  if (tape->level == 2) for (auto value = results; value != stack->end(); ++value) note(*value, step->makes);
  tape->steps.push_back(std::move(step));
}
TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&recorded>()); }
void enter(int64_t level) {
  tape = std::make_unique<Tape>(Tape{level});
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}
int64_t leave() {
  c10::impl::tls_set_dispatch_key_included(kKey, false); return std::exchange(tape, nullptr)->operators;
}
"""
#: By method: whether hooks are around a block, and what records in it; a number is what the fallback does.
METHODS: dict[str, tuple[bool, str | int]] = {
    "plain": (False, ""),
    "dispatch mode": (False, "mode"),
    "fallback": (False, 0),
    "fallback, arguments": (False, 1),
    "fallback, lineage": (False, 2),
    "fallback, lineage and hooks": (True, 2),
    "actckpt": (False, "region"),
}
_MATMULS = [torch.ops.aten.addmm, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu]


class _Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


def compiled() -> Any:
    """Return the recorder."""
    from torch.utils.cpp_extension import load_inline  # looks for a compiler

    return load_inline("dispatcher_recorder", [_SOURCE], functions=["enter", "leave"], extra_cflags=["-O2"])


def step(blocks: Any, hidden: torch.Tensor, method: str, recorder: Any) -> tuple[float, int]:
    """Run a step; return the seconds of its forward, and how many operators the recorder saw."""
    has_hooks, records, num, start = *METHODS[method], 0, time.process_time()
    for block in blocks:
        with ExitStack() as stack:
            if has_hooks:
                stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
            if isinstance(records, int):
                recorder.enter(records)
            elif records:
                stack.enter_context(_Idle() if records == "mode" else actckpt.region(_MATMULS))
            hidden = block(hidden)
            num += recorder.leave() if isinstance(records, int) else 0
    seconds = time.process_time() - start
    hidden.sum().backward()
    return seconds, num


def measure(recorder: Any, rounds: int, warm_ups: int = 10) -> dict[str, Any]:
    """Return the figures."""
    model = Transformer(shape := SHAPES["gpt2 thin"])
    hidden = torch.randn(1, shape.tokens, shape.width, requires_grad=True)
    num = num_operators(model, model.inputs())
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    seen: dict[str, int] = {}
    for _ in range(warm_ups + rounds):
        for name in random.sample(list(METHODS), len(METHODS)):
            passed, seen[name] = step(model.blocks, hidden, name, recorder)
            seconds[name].append(passed)
    figures: dict[str, Any] = {}
    for name, values in seconds.items():
        pairs = list(zip(values, seconds["plain"], strict=True))[warm_ups:]
        low, median, high = (round(us, 3) for us in statistics.quantiles([1e6 * (a - b) / num for a, b in pairs], n=4))
        figures[name] = {"us_per_operator": median, "quartiles_us": [low, high], "recorded_operators": seen[name]}
        print(f"{name:28} {median:7.2f} us [{low:.2f}, {high:.2f}]")
    return {"operators": num, "rounds": rounds, "methods": figures}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    content = {"machine": {**machine, "torch": torch.__version__}, "figures": measure(compiled(), rounds=300)}
    out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
