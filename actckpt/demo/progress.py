"""What the demo says while it trains: bars on a terminal, else lines, which a file can hold."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from actckpt.demo.methods import Method

__all__ = ["Bars", "Lines"]

#: Between two lines about one method.
_LINE_SECONDS = 10.0


class Bars:
    """A bar per method; a context around the training."""

    def __init__(self, methods: Sequence[Method], num_steps: int, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._tasks = {
            method.name: self._progress.add_task(method.name, total=num_steps, start=False, loss="waiting")
            for method in methods
        }

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, method: Method) -> None:
        """The training with a method begins."""
        self._task = self._tasks[method.name]
        self._progress.start_task(self._task)

    def step(self, loss: float) -> None:
        """A step has ended."""
        self._progress.update(self._task, advance=1, loss=f"loss {loss:.3f}")

    def race(self) -> None:
        """A further step begins, in which plans take turns."""
        self._progress.update(self._task, loss="plans take turns")


class Lines:
    """The same in lines: one when a method has ended, and one each ten seconds."""

    def __init__(self, methods: Sequence[Method], num_steps: int, console: Console) -> None:
        self._num_methods, self._num_steps, self._console = len(methods), num_steps, console
        self._num_begun = 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, method: Method) -> None:
        """The training with a method begins."""
        self._num_begun += 1
        self._name, self._num_ended = method.name, 0
        self._began_s = self._said_s = time.monotonic()

    def step(self, loss: float) -> None:
        """A step has ended."""
        self._num_ended += 1
        self._say(f"step {self._num_ended} of {self._num_steps}, loss {loss:.3f}", self._num_ended == self._num_steps)

    def race(self) -> None:
        """A further step begins, in which plans take turns."""
        self._say("plans take turns")

    def _say(self, what: str, is_last: bool = False) -> None:
        now_s = time.monotonic()
        if is_last or now_s - self._said_s >= _LINE_SECONDS:
            self._said_s = now_s
            method = f"{self._name} (method {self._num_begun} of {self._num_methods})"
            self._console.print(f"{method}: {what}, {now_s - self._began_s:.0f} s", highlight=False, markup=False)
