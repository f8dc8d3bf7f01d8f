"""Scripts that commands run: what they define, and the options for their steps."""

from __future__ import annotations

import argparse
import functools
import inspect
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from actckpt._commands.messages import as_options, none_fits, reason, unexpected, whole_number

__all__ = ["FORM", "Script", "add_policies", "add_sizes", "in_one_line", "policies_of", "policy_named", "sizes_of"]

_EXAMPLE = """\
  import torch

  def model():
      layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
      return torch.nn.TransformerEncoder(layer, 8)

  def optimizer(model):  # may be left out
      return torch.optim.AdamW(model.parameters())

  def step(model, batch=8, seq=512):
      x = torch.randn(batch, seq, 1024, device=next(model.parameters()).device)
      model(x).square().mean().backward()
"""
#: For the help of a command.
FORM = f"""\
The script defines model(), which returns a module, and step(model, batch=..., seq=...), which runs forward and
backward; it may define optimizer(model). For example:

{_EXAMPLE}"""


def add_sizes(parser: argparse.ArgumentParser, *, blocks: bool = True) -> None:
    """Add the options for the arguments of a step, and for the blocks of its model."""
    option = parser.add_argument
    option("--batch", type=whole_number, metavar="N", help="passed to step")
    option("--seq", type=whole_number, metavar="N", help="passed to step")
    if blocks:
        option("--blocks", nargs="+", metavar="NAME", help="qualified names of blocks, also with wildcards")


def add_policies(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option for policies; `default` describes the default ones."""
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAME",
        help="as in actckpt.apply: recompute, matmuls, attention, offload, ...; or aten.mm,aten.bmm,...: "
        "operators whose results are kept; or plan.json, which Plan.save wrote; may be repeated (default: "
        f"{default})",
    )


def in_one_line(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Make a command with a `file` exit with one line if an argument or the file is invalid, or if no plan fits."""

    @functools.wraps(run)
    def run_in_one_line(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except BrokenPipeError:
            raise
        except Exception as error:
            from actckpt.errors import ActckptError, PlanInfeasibleError

            if isinstance(error, PlanInfeasibleError):
                return none_fits(args, error)
            raised = unexpected(error, str(args.file))
            if raised is None and not isinstance(error, (ValueError, OSError, ImportError, ActckptError)):
                raise
            fail: Callable[[str], NoReturn] = args.parser.error
            fail(raised or as_options(reason(error)).replace("optimizer=...", "by optimizer(model) in the script"))

    return run_in_one_line


def sizes_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the arguments of the step.

    Raises:
        ValueError: a size is below 1.
    """
    sizes = {name: getattr(args, name) for name in ("batch", "seq") if getattr(args, name) is not None}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"--{name} is {size}, but must be at least 1.")
    return sizes


class Script:
    """A script that was run. Its output goes to standard error, not between results or into JSON.

    Raises:
        ValueError: it is no file, or does not define `model()` and `step()`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with redirect_stdout(sys.stderr):
            self._defined = _load(path)

    def model(self) -> Any:
        """Return the model.

        Raises:
            ValueError: it is no module.
        """
        with redirect_stdout(sys.stderr):
            model = _called(self._path, "model", self._defined["model"])
        if not hasattr(model, "named_modules"):
            raise ValueError(f"{self._path}: model() returned a {type(model).__name__}, no module.")
        return model

    def optimizers(self, model: Any, who: str) -> tuple[Any, ...]:
        """Return the optimizers of a model; empty if the script defines none.

        Raises:
            ValueError: the script returns something else.
        """
        from actckpt._core.optimizers import optimizers_of

        if "optimizer" not in self._defined:
            return ()
        try:
            with redirect_stdout(sys.stderr):
                return optimizers_of(self._defined["optimizer"](model), model, who)
        except TypeError as error:
            if unexpected(error, str(self._path)) is not None:
                raise
            raise ValueError(f"{self._path}: {error}") from None

    def step(self, model: Any, sizes: dict[str, int]) -> Callable[[], object]:
        """Return the step at these sizes.

        Raises:
            ValueError: it does not take them, or needs others.
        """
        function = self._defined["step"]
        try:
            inspect.signature(function).bind(model, **sizes)
        except TypeError as error:
            options = " ".join(f"--{name} {size}" for name, size in sizes.items()) or "no --batch, no --seq"
            raise ValueError(
                f"{self._path}: step(model, batch=..., seq=...) cannot be called with {options}: {error}."
            ) from None

        def run() -> object:
            with redirect_stdout(sys.stderr):
                return function(model, **sizes)

        return run


def _called(path: Path, name: str, function: Callable[[], Any]) -> Any:
    """Call a script's function that takes no arguments.

    Raises:
        ValueError: it takes some, or is a module.
    """
    if hasattr(function, "named_modules") and not isinstance(function, type):
        raise ValueError(
            f"{path}: {name} is a {type(function).__name__}, not a function. Define {name}() to return it."
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{path}: {name}() takes arguments ({error}). Define it without any.") from None
    except ValueError:  # a builtin without a signature
        pass
    return function()


def _load(path: Path) -> dict[str, Any]:
    """Run a script and return what it defines."""
    if not path.is_file():
        raise ValueError(f"{path} is no file. Pass a Python script that defines model() and step(model, ...).")
    if path.suffix == ".json":
        raise ValueError(f"{path} is no Python script. To show a plan: actckpt explain {path}; as a policy: --policy.")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        defined = runpy.run_path(str(path), run_name="__actckpt__")
    except SystemExit as error:
        raise ValueError(
            f"{path} ended itself (sys.exit, status {error.code}). Keep that under if __name__ == '__main__'."
        ) from None
    finally:
        sys.path.pop(0)
    if missing := [name for name in ("model", "step") if not callable(defined.get(name))]:
        raise ValueError(
            f"{path} defines no {' and no '.join(f'{name}()' for name in missing)}. Define model(), which returns a "
            "module, and step(model, batch=..., seq=...), which runs forward and backward."
        )
    return defined


def policies_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the policies of the command line; None if it names none.

    Raises:
        OSError: a plan's file cannot be read.
        ValueError: a name is invalid.
    """
    from actckpt.comparison import PLAIN, default_policies

    if args.policy is None:
        return None
    known = default_policies(offloads=True)
    names = dict.fromkeys(args.policy)
    names.pop(PLAIN, None)  # always has a row
    return {name: known[name] if name in known else policy_named(name) for name in names}


def policy_named(name: str) -> Any:
    """Return a policy by its name, a list of operators to keep, or a plan from its file."""
    from actckpt.planner.plans import Plan
    from actckpt.policies import choice_of

    if name.endswith(".json"):
        return Plan.load(name)
    if "." in name or "," in name:  # resolved after the script has run: it may define them
        return [op.strip() for op in name.split(",")]
    choice_of(name)  # raises if it is invalid
    return name
