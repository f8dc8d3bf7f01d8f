"""Steps of scripts that really run, on a device of this machine."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

from actckpt._commands.scripts import Script, add_sizes, sizes_of
from actckpt._text.sizes import number_in

__all__ = ["FORM_HERE", "Training", "add_device", "add_running", "budget_of"]

#: For the help of a command.
FORM_HERE = """\
The step runs on this machine, each time without gradients at its begin. Make its inputs on the device of the
model's parameters. An optimizer that the script defines has its state, as after a first step, which counts toward
--budget."""


def add_running(parser: argparse.ArgumentParser) -> None:
    """Add the options for running a step, and its activation budget."""
    add_sizes(parser)
    add_device(parser)
    parser.add_argument(
        "--activation-budget", metavar="SIZE", help="most memory for the tensors that a step makes: 4GiB, or 60%%"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add where a step runs."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where the model trains: cpu, or a GPU: cuda, cuda:N (default: where model() put it, if that is no CPU; "
        "else the GPU where there is one)",
    )


def budget_of(args: argparse.Namespace) -> dict[str, float | str]:
    """Return the budget of the command line as a keyword of `actckpt.plan`; empty if there is none.

    Raises:
        ValueError: there are two.
    """
    named = {name: getattr(args, name, None) for name in ("budget", "activation_budget")}
    budgets = {name: size for name, size in named.items() if size is not None}
    if len(budgets) == 2:
        raise ValueError("--budget and --activation-budget are both given. Pass one of them.")
    share = number_in(budgets.get("budget", ""))
    return {"budget": share} if share is not None and 0 < share <= 1 else budgets


class Training:
    """The model, optimizers and step of a script, on a device of this machine.

    Raises:
        ValueError: the script has none of them, or they do not fit the device or the command line.
    """

    def __init__(self, args: argparse.Namespace, who: str) -> None:
        sizes, script = sizes_of(args), Script(args.file)
        self.model = script.model()
        _place(self.model, args.device)
        self.optimizers = script.optimizers(self.model, who)
        if self.optimizers:
            _make_states(self.model, self.optimizers)
        self._step = script.step(self.model, sizes)

    def step(self, say: Callable[[str], object], of: str = "") -> Callable[[], object]:
        """Return the step; each run calls `say`."""
        numbers = itertools.count(1)

        def run() -> object:
            say(f"step {next(numbers)}{of}")
            return self._step()

        return run


def _place(model: Any, name: str | None) -> None:
    """Move a model to the device on which it trains.

    Raises:
        ValueError: the device is not usable here, or not for the model.
    """
    from actckpt._core.devices import usable

    device = usable(name or "auto")
    types = {parameter.device.type for parameter in model.parameters()}
    if "meta" in types:
        raise ValueError(
            "model() returned parameters on the meta device, which have no numbers to run with. Make them on a device, "
            "or use actckpt estimate."
        )
    if name is None and types - {"cpu"}:
        return
    try:
        model.to(device)
    except RuntimeError as error:
        raise ValueError(f"The model cannot be moved to {device}: {error}") from None


def _make_states(model: Any, optimizers: tuple[Any, ...]) -> None:
    """Let optimizers create their state without a real first step, which may need more memory than there is."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    for parameter in trained:
        parameter.grad = None
