"""Everything that `te` uses of the private rooms, besides `_core.extensions`. Otherwise it uses public names.

`te` registers an extension (`_core.extensions`), and also builds its own regions. For these it queries the running
code, holds calls, and opens `offload` blocks.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from actckpt._C import EVERYTHING_STAYS
from actckpt._core.devices import is_capturing
from actckpt._core.random_state import GetTracker
from actckpt._core.sites import is_code_running, modules_on_stack, warn_once, warn_user
from actckpt._core.torch_private import Hooks, disable_dynamo, outer_hooks, without_tensor_hooks
from actckpt._core.warning_texts import WarningText
from actckpt._offload.session import DEFAULT_MIN_BYTES, Offloading, Session
from actckpt._rerun.held_call import HeldCall, tensors_of

__all__ = [
    "DEFAULT_MIN_BYTES",
    "GetTracker",
    "HeldCall",
    "Hooks",
    "WarningText",
    "disable_dynamo",
    "everything_stays",
    "is_capturing",
    "is_code_running",
    "modules_on_stack",
    "offloading_hooks",
    "tensors_of",
    "warn_once",
    "warn_user",
    "without_tensor_hooks",
]


def offloading_hooks(min_bytes: int) -> Hooks:
    """Return (pack, unpack) that offload tensors of at least `min_bytes`."""
    return Session("auto", min_bytes).hooks


def everything_stays() -> AbstractContextManager[Any]:
    """Return a context in which saved tensors stay, even inside an `offload` block."""
    return nullcontext() if outer_hooks() is None else Offloading("auto", EVERYTHING_STAYS)
