"""torch.compile makes no graphs of the library's own code that runs between compiled graphs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from internals.stores import PythonStore, store_in_memory, using
from oracle import leaf, mlp

import actckpt

pytestmark = pytest.mark.usefixtures("fresh_compiler")


_cached = torch._C._dynamo.eval_frame._debug_get_cache_entry_list


def _traced(*rooms: str) -> set[str]:
    """Return which functions of these rooms the compiler has made graphs of."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(rooms):
            members = [module, *(each for each in vars(module).values() if isinstance(each, type))]
            functions = (each for member in members for each in vars(member).values() if inspect.isfunction(each))
            found |= {each.__qualname__ for each in functions if _cached(each.__code__)}
    return found


@pytest.mark.parametrize("kind", ["offload", "replay", "replay from a store"])
def test_what_hooks_run_between_compiled_graphs_is_not_traced(kind: str) -> None:
    """A compiled look at a GPU's stream finds an object without a handle."""
    contexts: dict[str, Callable[[], Any]] = {
        "offload": lambda: actckpt.offload(min_bytes=0),
        "replay": actckpt.region,
        "replay from a store": lambda: actckpt.region("offload"),
    }
    model, x = mlp(), leaf(64, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        with contexts[kind]():
            y = model(x * 2).sin()
        y.cos().sum().backward()
        return y

    torch.compile(step, backend="aot_eager")(x)
    assert x.grad is not None
    assert not _traced(
        "actckpt._core.devices",
        "actckpt._core.accelerator",
        "actckpt._core.cuda",
        "actckpt._offload",
        "actckpt._replay",
    )


def test_frames_of_a_store_are_not_compiled() -> None:
    """What is in Python of the store of devices runs in hooks, while compiled functions do."""
    store, code = PythonStore(store_in_memory()), PythonStore.put.__code__
    model, x = mlp(), leaf(64, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        with actckpt.offload(min_bytes=0):
            return model(x * 2).sin()

    with using(store):
        torch.compile(function, backend="eager")(x).sum().backward()
    assert store.buffers, "nothing was moved"
    assert _cached(code) == []
