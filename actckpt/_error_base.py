"""What needs no torch of `actckpt.errors`: the planner does not import torch."""

__all__ = ["ActckptError", "ActckptWarning", "CostTableError", "PlanInfeasibleError", "TorchVersionError"]


class ActckptError(Exception):
    """Base of every error that actckpt raises on its own account."""


class ActckptWarning(UserWarning):
    """Category of every warning of actckpt, but for deprecations.

    Example::

        >>> import warnings, actckpt
        >>> warnings.filterwarnings("ignore", category=actckpt.errors.ActckptWarning)
    """


class CostTableError(ActckptError, ValueError):
    """A cost table says something that cannot be. The message names the field."""


class TorchVersionError(ActckptError):
    """What was called needs a private name of torch that the installed version does not have."""


class PlanInfeasibleError(ActckptError, ValueError):
    """No plan fits into the budget.

    Args:
        message: what holds the memory.
        smallest_bytes: the smallest budget for which there is a plan; None: there is none, however large, or a program
            (DataParallel, Pyro) made the error again of its words alone.
        holds: what holds memory where most of it is needed, as part of a sentence.
    """

    def __init__(self, message: str, smallest_bytes: float | None = None, holds: str = "") -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.holds = holds

    def __reduce__(self) -> tuple[type, tuple[str, float | None, str]]:
        return type(self), (str(self), self.smallest_bytes, self.holds)
