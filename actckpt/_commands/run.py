"""`actckpt run script.py`: a training program whose model is checkpointed, without a change to its code."""

from __future__ import annotations

import argparse
import importlib.util
import operator
import os
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

from actckpt._commands.messages import as_options, reason
from actckpt._commands.running import budget_of
from actckpt._commands.scripts import policy_named

__all__ = ["add_run"]

_EPILOG = """\
The model is the outermost module that the program calls with gradients enabled and that has parameters to train. Of
several, such as the networks of a GAN, it is the one with most parameters that is called before the first step of an
optimizer. --model names another one. It gets actckpt.apply before its first such call. At the end, the report of the
model goes to the standard error stream.

  actckpt run --budget 70GiB train.py --lr 3e-4
  torchrun --nproc-per-node 8 -m actckpt.run --policy matmuls train.py
  accelerate launch -m actckpt.run --activation-budget 60% train.py
"""


def add_run(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "run",
        help="run a training program with its model checkpointed; no line of it changes",
        description="Run a training program with its model checkpointed. No line of the program changes.\n"
        "Exit status: that of the program; 2 bad arguments.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--budget", metavar="SIZE", help="most memory at any time: 70GiB, a share of the device (90%%), or auto")
    option("--activation-budget", metavar="SIZE", help="most memory for the tensors that a step makes: 4GiB, or 60%%")
    option("--policy", metavar="NAME", help="as in actckpt.apply: matmuls, offload, ... (default: recompute)")
    option(
        "--blocks", action="append", metavar="NAME", help="qualified name of blocks, also with wildcards; repeatable"
    )
    option("--model", metavar="NAME", help="the model in the program's main module: model, or trainer.model")
    option(
        "--report", type=Path, metavar="FILE", help="also write the report: a page (.html), or text (other suffixes)"
    )
    option("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    option("script", metavar="SCRIPT", help="the program")
    option("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    parser.set_defaults(run=_run, parser=parser, runs_program=True)


def _run(args: argparse.Namespace) -> int:
    try:
        options = _options_of(args)
        if not args.is_module and not Path(args.script).is_file():
            raise ValueError(f"{args.script} is not a file. Pass a Python program, or -m and the name of a module.")
        if args.report is not None and not args.report.absolute().parent.is_dir():  # before the program runs
            raise ValueError(
                f"--report {args.report}: there is no folder {args.report.absolute().parent}. Make it first."
            )
    except (ValueError, OSError) as error:
        args.parser.error(as_options(reason(error)))
    applying = _Applying(options, args.model)
    path = None if args.report is None else args.report.absolute()  # the program may go to another folder
    try:
        with applying:
            _run_program(args)
    finally:
        if applying.has_model or not isinstance(sys.exc_info()[1], Exception):  # else its error says more
            _say(applying.report(path) + _passed_on(args, applying))
    return 0


def _passed_on(args: argparse.Namespace, applying: _Applying) -> str:
    """Return a hint if an option was passed to the program, and nothing was checkpointed; else nothing."""
    words = [word.partition("=")[0] for word in args.args]
    passed = [word for word in words if word in ("--budget", "--activation-budget", "--policy", "--blocks", "--model")]
    if applying.has_model or not passed:
        return ""
    return f" {passed[0]} was passed to {args.script}: options of actckpt run stand before the program."


def _run_program(args: argparse.Namespace) -> None:
    """Run the program as `python` does. Its module stays `__main__`: threads and exit handlers may need it."""
    main = types.ModuleType("__main__")
    if args.is_module:
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(args.script)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{args.script}.__main__")
        loader: Any = None if spec is None else spec.loader
        if spec is None or loader is None:
            raise ImportError(f"No module named {args.script}")
        code, path = loader.get_code(spec.name), spec.origin
        main.__spec__, main.__package__ = spec, spec.parent
    else:
        path = args.script
        sys.path.insert(0, str(Path(path).resolve().parent))
        code = compile(Path(path).read_bytes(), path, "exec")
    main.__file__ = path
    sys.argv = [str(path), *args.args]
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `apply`.

    Raises:
        ValueError: they cannot be given together, or a value has no meaning.
    """
    import torch

    from actckpt._budget.budget_config import check_budget
    from actckpt._core.devices import usable

    options: dict[str, Any] = budget_of(args)
    if options and args.policy is not None:
        raise ValueError("A budget and --policy are both given. Pass one of them: the budget decides the policy.")
    if options:
        check_budget(options, torch.nn.Linear(1, 1).to(usable("auto")), "run")
    elif args.policy is not None:
        options["policy"] = policy_named(args.policy)
    return options if args.blocks is None else {**options, "blocks": args.blocks}


class _Applying:
    """Calls `apply` for the model of a program at its first call with gradients.

    Until an optimizer has made a step, outermost calls of modules pass through here.

    Args:
        options: of `apply`.
        name: of the model in the program's main module; None: the outermost module.
    """

    def __init__(self, options: dict[str, Any], name: str | None) -> None:
        self._options, self._name = options, name
        self._model: Any = None
        self._num_parameters = 0
        self._refused: weakref.WeakSet[Any] = weakref.WeakSet()
        self._why_refused = ""
        self._has_said_why = False
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def __enter__(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._module_type, self._call = torch.nn.Module, torch.nn.Module.__call__
        self._optimizer_type, self._make = torch.optim.Optimizer, torch.optim.Optimizer.__init__
        self._collect_optimizers()
        self._hook = register_optimizer_step_post_hook(lambda *_: self._after_step())
        self._watch()

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._optimizer_type.__init__ is self._make_and_collect:
            self._optimizer_type.__init__ = self._make  # type: ignore[method-assign]

    def _collect_optimizers(self) -> None:
        """Keep the optimizers that the program makes: their state counts toward a budget."""

        def make_and_collect(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._make(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        self._make_and_collect = make_and_collect
        self._optimizer_type.__init__ = make_and_collect  # type: ignore[method-assign,assignment]

    def _options_for(self, model: Any) -> dict[str, Any]:
        """Return the keywords of `apply`, with the optimizers of the model where there is a budget."""
        if self._options.keys().isdisjoint({"budget", "activation_budget"}):
            return self._options
        trained = {id(parameter) for parameter in model.parameters()}
        optimizers = [
            optimizer
            for optimizer in self._optimizers
            if any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"])
        ]
        return {**self._options, "optimizer": optimizers} if optimizers else self._options

    def _after_step(self) -> None:
        if self._model is not None:
            self._end()
        elif not self._has_said_why:
            self._has_said_why = True
            _say(f"after the first step of an optimizer, {self.report()}")

    def _end(self) -> None:
        self._hook.remove()
        self._is_watching = False
        self._replace(self._look_and_call, self._call)

    def _replace(self, old: Any, new: Any) -> None:
        """Replace `Module.__call__`, unless the program has replaced it."""
        if self._module_type.__call__ is old:
            self._module_type.__call__ = new  # type: ignore[method-assign]

    def _watch(self) -> None:
        """Look at each outermost call of a module."""
        call, thread = self._call, threading.local()

        def look_and_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_watching or getattr(thread, "is_inside", False):
                return call(module, *args, **kwargs)
            thread.is_inside = True
            self._replace(look_and_call, call)  # so that compiled code sees torch's
            try:
                self._look_at(module)
                return call(module, *args, **kwargs)
            finally:
                thread.is_inside = False
                if self._is_watching:
                    self._replace(call, look_and_call)

        self._is_watching, self._look_and_call = True, look_and_call
        self._replace(call, look_and_call)

    def _look_at(self, module: Any) -> None:
        import torch

        import actckpt

        if not torch.is_grad_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return
        num_parameters = _num_trained(module)
        if num_parameters == 0:
            return
        if self._name is not None:
            module = self._named_model()
        elif num_parameters <= self._num_parameters:
            return
        if module is None or module is self._model or module in self._refused:
            return
        if self._model is not None:
            actckpt.remove(self._model)
        try:
            names = actckpt.apply(module, **self._options_for(module))
        except actckpt.errors.BlocksError as error:
            self._refused.add(module)
            self._why_refused = str(error)
            if self._model is not None:
                actckpt.apply(self._model, **self._options_for(self._model))
            return
        before = (
            ""
            if self._model is None
            else f", in place of those of a {type(self._model).__name__} with fewer parameters"
        )
        self._model, self._num_parameters = module, num_parameters
        _say(f"{len(names)} blocks of {type(module).__name__} are checkpointed{before}")

    def _named_model(self) -> Any:
        """Return the model with the given name; None where the program has not defined it yet."""
        assert self._name is not None
        try:
            model = operator.attrgetter(self._name)(sys.modules["__main__"])
        except AttributeError:
            return None
        if not isinstance(model, self._module_type):
            raise ValueError(f"--model {self._name} is a {type(model).__name__}, not a module.")
        return model

    @property
    def has_model(self) -> bool:
        """Whether a model was found."""
        return self._model is not None

    def report(self, path: Path | None = None) -> str:
        """Say what the blocks did, or why no model was checkpointed; write what they did to a file, if there is one."""
        import actckpt

        if self._model is not None:
            report = actckpt.report(self._model)
            written = "" if path is None or not _is_first_rank() else f"\n{_written(report, path)}"
            return f"report of {type(self._model).__name__}\n{report}{written}"
        if self._why_refused:
            return f"nothing was checkpointed. {self._why_refused} Here: --blocks NAME."
        if self._name is not None:
            return f"nothing was checkpointed: the main module has no {self._name} while gradients are computed."
        return "nothing was checkpointed: no module with parameters to train was called with gradients enabled."


def _num_trained(module: Any) -> int:
    """Return the number of elements of parameters that are trained."""
    from torch.nn.parameter import is_lazy

    return sum(each.numel() for each in module.parameters() if each.requires_grad and not is_lazy(each))


def _written(report: Any, path: Path) -> str:
    """Write a report to a file; say where it is, or why not: the exit status is that of the program."""
    try:
        if path.suffix == ".html":
            report.to_html(path)
        else:
            path.write_text(f"{report.table()}\n", encoding="utf-8")
    except OSError as error:
        return f"The report was not written: {error}"
    return f"The report is in {path}."


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    """Print a line, on the first of several ranks, unless the program has closed the stream."""
    if _is_first_rank() and sys.stderr is not None and not sys.stderr.closed:
        print(f"actckpt run: {text}", file=sys.stderr, flush=True)
