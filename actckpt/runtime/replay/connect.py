"""Tells the extension (csrc/replay) what recording and replay need of Python and torch, once."""

from typing import Any

import torch

from actckpt import _frames
from actckpt.action import Action
from actckpt.runtime import torch_private
from actckpt.runtime.replay import aliases, opened, recorder, saved, wrappers
from actckpt.runtime.replay.operators import Operator, operator_of
from actckpt.runtime.replay.paused import paused

__all__ = ["NAMES"]


def _describe(func: Any) -> Operator | None:
    """Return the facts about an overload; None for higher-order operators, which are not recorded (Rule 10)."""
    return operator_of(func) if isinstance(func, torch._ops.OpOverload) else None


#: By the names of the fields in csrc/replay/names.h; None where torch has no such thing.
NAMES: dict[str, Any] = {
    "paused": paused,
    "describe": _describe,
    "record_special": recorder.record_special,
    "note_wrappers": wrappers.note,
    "begin_audit": saved.begin_audit,
    "pack_other": saved.pack_other,
    "unpack_slowly": saved.unpack_slowly,
    "keep": Action.KEEP,
    "recompute": Action.RECOMPUTE,
    "why_inference": aliases.WHY_INFERENCE,
    "below_autograd": torch_private.below_autograd,
    "keeps_graph": torch_private.keeps_graph,
    "any_autocast_enabled": torch_private.any_autocast_enabled,
    "num_function_modes": torch_private.num_function_modes,
    "exchange_api": torch_private.exchange_api,
    "num_recorders": opened.num_recorders,
}

_frames.connect_replay(NAMES)
