"""`trace`: a timeline of operators, recomputation in backward, and live bytes, for Perfetto."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function, supported_activities

from actckpt import _C
from actckpt._core.observing_mode import ObservingMode
from actckpt.memory import LiveStorages

__all__ = ["trace"]

#: Event names.
_BEGIN, _AGAIN, _COUNTER = "actckpt: trace begins", "actckpt: again", "actckpt: live bytes"
#: Operators that reruns and replays also run; they launch no kernel.
_BOOKKEEPING = {"aten::detach", "aten::as_strided", "aten::set_", "aten::empty"}


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], *, parameters: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Write what runs inside the `with` block as a trace, which https://ui.perfetto.dev and chrome://tracing open.

    It has the operators that torch's profiler sees, a range `actckpt: again <operator>` around each one that backward
    runs again (replayed, or in a rerun), and a counter of live bytes: storages that operators inside the block made, as
    `actckpt.memory.LiveStorages` counts them. If the block raises, the trace ends there.

    Args:
        path: the file to write, JSON in Chrome's trace format, compressed if the name ends in `.gz`.
        parameters: leaf tensors whose gradients are not counted once they are accumulated.

    Raises:
        OSError: the file cannot be written; before the block runs.
        ValueError: one of `parameters` is not a leaf.

    Example::

        with actckpt.trace("step.json", parameters=model.parameters()):
            loss_fn(model(x)).backward()

    Cost: that of torch's profiler and some microseconds per operator; times inside the block are not those of a normal
    step.
    """
    path = Path(path)
    with path.open("ab"):  # otherwise found out only after a long step
        pass
    live = LiveStorages(parameters=parameters, timeline=True)
    began_s = time.perf_counter()
    profiler = _started_profiler()
    try:
        with record_function(_BEGIN):
            offset_s = time.perf_counter() - began_s
        with live, _Again():
            yield
    finally:
        profiler.stop()
        _write(path, profiler, [(seconds - offset_s, nbytes) for seconds, nbytes in live.timeline])


def _started_profiler() -> profile:
    profiler = profile(activities=supported_activities())
    with warnings.catch_warnings():  # torch 2.11 warns at the first cycle already that the next would clear its events
        warnings.filterwarnings("ignore", ".*Profiler clears events", UserWarning)
        profiler.start()
    return profiler


class _Again(ObservingMode):
    """Names the operators that run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (_C.is_rerunning() or _C.is_paused()) or func._schema.name in _BOOKKEEPING:
            return func(*args, **(kwargs or {}))
        with record_function(f"{_AGAIN} {func}"):
            return func(*args, **(kwargs or {}))


def _write(path: Path, profiler: profile, timeline: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        document = json.loads(exported.read_text())
    events = document["traceEvents"]
    begin = next(event for event in events if event.get("name") == _BEGIN and event.get("ph") == "X")
    events += [
        {
            "ph": "C",
            "name": _COUNTER,
            "pid": begin["pid"],
            "ts": begin["ts"] + 1e6 * seconds,
            "args": {"bytes": nbytes},
        }
        for seconds, nbytes in timeline
    ]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        json.dump(document, file)
