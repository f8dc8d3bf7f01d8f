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

Warnings are of the category `ActckptWarning`, a UserWarning; those of deprecated arguments are also a
DeprecationWarning: `ActckptDeprecationWarning`.
"""

from torch.utils.checkpoint import CheckpointError

from actckpt._C import ForkedError, OffloadError, OffloadFullError, OffloadReadError
from actckpt._error_base import (
    ActckptDeprecationWarning,
    ActckptError,
    ActckptWarning,
    CostTableError,
    PlanInfeasibleError,
    TorchVersionError,
)

__all__ = [
    "ActckptDeprecationWarning",
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
    """A rerun saved other tensors or values than the forward did, or a parameter changed in between.

    What to do: make the function take the same path in both runs, and call backward before `optimizer.step()`. Pass
    `debug=True` to `checkpoint` to see the operators of both runs.
    """


class InputChangedError(ActckptError, CheckpointError):
    """A tensor that a rerun needs was changed in place after the forward.

    What to do: change a clone, or call backward first. Keep a statistic that the function updates in a buffer of its
    module.
    """


class SavedTensorChangedError(ActckptError, CheckpointError):
    """A tensor was changed in place, or its memory was freed, after an operator had saved it for backward.

    What to do: use the out-of-place operator, or clone the tensor before it is changed.
    """


class AuditError(ActckptError, CheckpointError):
    """Replay made other bytes than the forward had: something wrote to memory that no operator declares.

    What to do: name the operator or module in `configure(opaque=[...])`, whose values are then kept; or use
    `checkpoint` without a policy, which runs the function again.
    """


class BlocksError(ActckptError, ValueError):
    """A function of a whole model, such as `apply` or `remove`, cannot do what was asked with these blocks.

    What to do: pass `blocks=`, the modules that repeat, as type, names or modules. Call `remove(model)` before you
    apply something else to parts of a model.
    """


class StillOpenError(ActckptError, RuntimeError):
    """A region or an offload block is opened twice, or closed where it cannot be; it stays as it is.

    What to do: make a new one for each `with`. Close it in the thread that opened it, after all that was opened in it.
    """


class TransformerEngineError(ActckptError):
    """TransformerEngine is not as actckpt knows it, or is used in a way that would give wrong gradients.

    What to do: install a version that the page about TransformerEngine lists, or call its own functions as the message
    says.
    """


OffloadError.__doc__ = """The engine that copies to host memory and disk failed.

It made no spill file, a write or a call of the device failed, or the memory of a tensor was freed while it was copied.

What to do: set another folder with `configure(spill_dir=...)`; look for an earlier error of the device.
"""
OffloadFullError.__doc__ = """`host_limit`, `disk_limit`, the system or the file system has no room.

What to do: raise the limit that the message names with `configure`, or offload less.
"""
OffloadReadError.__doc__ = """Reading the spill file failed, or its bytes are not those that were written.

What to do: check the disk, or set another folder with `configure(spill_dir=...)`, and repeat the step.
"""
ForkedError.__doc__ = """A child process uses the engine of the process that forked it.

What to do: start processes with the method `"spawn"`, or open `offload` blocks in the child only.
"""
