"""Errors that need no torch, for the planner, which does not import it. All of them are in `actckpt.errors`."""

__all__ = [
    "ActckptDeprecationWarning",
    "ActckptError",
    "ActckptWarning",
    "CostTableError",
    "PlanInfeasibleError",
    "TorchVersionError",
]


class ActckptError(Exception):
    """Base of all errors that actckpt raises itself.

    What to do: catch it where a program can go on without actckpt; catch the classes below elsewhere.
    """


class ActckptWarning(UserWarning):
    """Category of every warning of actckpt.

    Example::

        >>> import warnings, actckpt
        >>> warnings.filterwarnings("ignore", category=actckpt.ActckptWarning)
    """


class ActckptDeprecationWarning(ActckptWarning, DeprecationWarning):
    """Category of warnings of deprecated arguments; Python shows them in `__main__` only, as other deprecations."""


class CostTableError(ActckptError, ValueError):
    """A cost table has an invalid value. The message names the field.

    What to do: mend that field, or make the table again.
    """


class TorchVersionError(ActckptError):
    """The function needs a private name of torch that the installed version lacks.

    What to do: install a torch that README.md lists, or leave out the feature that the message names.
    """


class PlanInfeasibleError(ActckptError, ValueError):
    """No plan fits into the budget. `smallest_bytes` is the smallest budget for which there is a plan.

    What to do: pass that budget or a larger one, or make the batch smaller. `apply` raises this with
    `on_infeasible="raise"` only; by default it warns.

    Args:
        message: what holds the memory.
        smallest_bytes: the smallest budget for which there is a plan; None: there is none, or a program (DataParallel,
            Pyro)
            recreated the error from its message alone.
        holds: what holds memory at the peak, as part of a sentence.
    """

    def __init__(self, message: str, smallest_bytes: float | None = None, holds: str = "") -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.holds = holds

    def __reduce__(self) -> tuple[type, tuple[str, float | None, str]]:
        return type(self), (str(self), self.smallest_bytes, self.holds)
