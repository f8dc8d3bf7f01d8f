"""`label_memory`: names for the allocations of a step in PyTorch's memory viewer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from actckpt import _C
from actckpt._core import devices
from actckpt._core.observing_mode import ObservingMode
from actckpt._core.sites import module_name, warn_once
from actckpt._core.warning_texts import WarningText

__all__ = ["label_memory"]

_NO_LABELS = WarningText(
    "label_memory: nothing is labelled, and memory snapshots have no labels of actckpt: {reason}.",
    "Use a CUDA device and a torch that has torch.cuda.memory._set_memory_metadata.",
    per="process",
)


@contextlib.contextmanager
def label_memory() -> Iterator[None]:
    """Label allocations on CUDA devices inside the `with` block by the operator and the module that make them.

    A snapshot of `torch.cuda.memory` recorded meanwhile has the labels, as `user_metadata` of its blocks and events,
    and https://pytorch.org/memory_viz shows them. `actckpt: aten.addmm.default in layers.0.mlp` is what the forward
    makes; its kept bytes stay alive. `actckpt: again aten.gelu.default in layers.0.mlp` is what reruns and replays make
    in backward. `actckpt: again, offloaded` is what is loaded. Afterwards the program's own labels are restored.

    Warns if torch, or the machine, does not support labels.

    Example::

        torch.cuda.memory._record_memory_history()
        with actckpt.label_memory():
            loss_fn(model(x)).backward()
        torch.cuda.memory._dump_snapshot("step.pickle")

    Cost: inspects the Python stack at each operator, for the module; times inside the block are not those of a normal
    step.
    """
    accelerator = devices.available()
    labels = None if accelerator is None else accelerator.memory_labels()
    if labels is None:
        where = "there is no device" if accelerator is None else f"torch {torch.__version__} labels no memory there"
        warn_once(_NO_LABELS, reason=where)
        yield
        return
    before = labels.get()
    try:
        with _Labelling(labels.set, before):
            yield
    finally:
        labels.set(before)


class _Labelling(ObservingMode):
    """Labels what operators allocate."""

    def __init__(self, label: Callable[[str], None], outside: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._label, self._outside = label, outside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._label("actckpt: again, offloaded" if _C.is_loading() else _label(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._label(self._outside)


def _label(func: Any) -> str:
    again = "again " if _C.is_rerunning() or _C.is_paused() else ""
    module = module_name()
    return f"actckpt: {again}{func}{'' if module is None else f' in {module}'}"
