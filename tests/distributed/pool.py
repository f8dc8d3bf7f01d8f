"""Two processes of one group of gloo, started once: they run functions of test modules, and tell what these raised."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["NUM_RANKS", "RankError", "Ranks", "on_ranks"]

NUM_RANKS = 2
#: What a test may take; most take less than a second.
_TIMEOUT_S = 60.0
#: Where one rank has failed, the other gets so long: it may wait for a collective that never comes.
_GRACE_S = 3.0


class RankError(AssertionError):
    """A function failed on a rank, or did not end there."""


class Ranks:
    """The two processes. Where a function fails in one of them, the next call starts others."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = _TIMEOUT_S) -> list[Any]:
        """Call a function of a module on every rank, and return what each returned.

        Raises:
            RankError: it raised somewhere, a process died, or it took more than `timeout_s`; with the traceback of each
                rank that raised, and the stack of each that did not end.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        answers = self._answers(time.monotonic() + timeout_s)
        if all(answer is not None and answer[0] for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        try:
            texts = [self._said(rank, answer) for rank, answer in enumerate(answers)]
        finally:
            self.close()
        name = getattr(function, "__qualname__", function)
        raise RankError(f"{name}{args} did not end well within {timeout_s:g} s.\n" + "\n".join(texts))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, Path(self._folder.name)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        for connection in self._connections:  # a test's time begins when both are there
            connection.recv()

    def _answers(self, deadline: float) -> list[tuple[bool, Any] | None]:
        """Return what each rank answered, None where it did not."""
        answers: list[tuple[bool, Any] | None] = [None] * NUM_RANKS
        open_ones = dict(zip(self._connections, range(NUM_RANKS), strict=True))
        while open_ones:
            for ready in wait(list(open_ones), max(deadline - time.monotonic(), 0.0)):
                rank = open_ones.pop(ready)  # type: ignore[call-overload]  # one of them
                try:
                    answers[rank] = ready.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = False, "the process is gone"
                if not answers[rank][0]:  # type: ignore[index]
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() >= deadline:
                break
        return answers

    def _said(self, rank: int, answer: tuple[bool, Any] | None) -> str:
        if answer is not None:
            return f"-- rank {rank}: " + ("ended" if answer[0] else f"raised\n{answer[1]}")
        assert self._folder is not None
        process = self._processes[rank]
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"-- rank {rank}: still runs\n{_stacks_of(Path(self._folder.name), rank).read_text()}"


def on_ranks(function: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function of a module that runs on every rank, with the arguments of the test."""

    def test(ranks: Ranks, **arguments: Any) -> None:
        ranks.run(_call, function.__module__, function.__name__, arguments)

    own = inspect.signature(test).parameters["ranks"]
    functools.update_wrapper(test, function)
    del test.__wrapped__  # type: ignore[attr-defined]
    signature = inspect.signature(function)
    test.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[own, *signature.parameters.values()]
    )
    test.on_rank = function  # type: ignore[attr-defined]
    return test


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).on_rank(**arguments)


def _stacks_of(folder: Path, rank: int) -> Path:
    return folder / f"stacks{rank}"


def _serve(rank: int, connection: Connection, folder: Path) -> None:
    with _stacks_of(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        torch.set_num_threads(1)
        seconds = datetime.timedelta(seconds=10 * _TIMEOUT_S)  # the parent looks at the clock, and gloo does not
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS, timeout=seconds
        )
        connection.send("ready")
        while True:
            try:
                function, args = connection.recv()
            except EOFError:
                return
            try:
                connection.send((True, function(*args)))
            except BaseException:
                connection.send((False, traceback.format_exc()))
