"""Errors of actckpt.

    ActckptError
    |-- RerunMismatchError      also torch.utils.checkpoint.CheckpointError
    |-- InputChangedError       also torch.utils.checkpoint.CheckpointError
    |-- AuditError              also torch.utils.checkpoint.CheckpointError
    |-- SavedTensorChangedError also torch.utils.checkpoint.CheckpointError
    |-- BlocksError             also ValueError
    |-- CostTableError          also ValueError
    |-- PlanInfeasibleError     also ValueError
    |-- StillOpenError          also RuntimeError
    |-- TorchVersionError
    |-- TransformerEngineError
    `-- OffloadError            also RuntimeError; of the engine that copies to host memory and disk
        |-- OffloadFullError
        |-- OffloadReadError
        `-- ForkedError

Mismatch errors derive from torch's CheckpointError (a RuntimeError), so that handlers written for
torch's function keep working. Every message says what and where, both numbers, and the next step.

Warnings are of the category `ActckptWarning`, a UserWarning.
"""

from torch.utils.checkpoint import CheckpointError

from actckpt._C import ForkedError, OffloadError, OffloadFullError, OffloadReadError
from actckpt._error_base import (
    ActckptError,
    ActckptWarning,
    CostTableError,
    PlanInfeasibleError,
    TorchVersionError,
)

__all__ = [
    "ActckptError",
    "ActckptWarning",
    "AuditError",
    "BlocksError",
    "CheckpointError",
    "CostTableError",
    "ForkedError",
    "InputChangedError",
    "OffloadError",
    "OffloadFullError",
    "OffloadReadError",
    "PlanInfeasibleError",
    "RerunMismatchError",
    "SavedTensorChangedError",
    "StillOpenError",
    "TorchVersionError",
    "TransformerEngineError",
]


class RerunMismatchError(ActckptError, CheckpointError):
    """A rerun saved other tensors than the forward did."""


class InputChangedError(ActckptError, CheckpointError):
    """A tensor that a rerun needs was changed in place after the forward."""


class SavedTensorChangedError(ActckptError, CheckpointError):
    """A tensor was changed in place after an operator had saved it for backward."""


class AuditError(ActckptError, CheckpointError):
    """Replay made other bytes than the forward had: something wrote to memory without an operator saying so."""


class BlocksError(ActckptError, ValueError):
    """`apply` or `remove` cannot do what was asked with these blocks."""


class StillOpenError(ActckptError, RuntimeError):
    """A region or an offload block is opened twice, or closed where it cannot be; it stays as it is."""


class TransformerEngineError(ActckptError):
    """TransformerEngine is not as actckpt knows it, or is used in a way that would give wrong gradients."""
