"""Tells the extension (csrc/replay) what recording and replay need of Python and torch, once."""

from typing import Any

from actckpt import _frames
from actckpt.action import Action
from actckpt.runtime import torch_private
from actckpt.runtime.replay import aliases, opened, recorder, saved, unseen, wrappers
from actckpt.runtime.replay.operators import operator_of

__all__ = ["NAMES"]


#: By the names of the fields in csrc/replay/names.h; None where torch has no such thing.
NAMES: dict[str, Any] = {
    "describe": operator_of,
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
    "recording": opened.recording,
    "made_by_function": unseen.made_by_function,
    "saved_by_function": unseen.saved_by_function,
    "function_type": torch_private.function_node_type,
    "apply_code": torch_private.apply_code,
    "compiled_prefix": torch_private.COMPILED_PREFIX,
}

_frames.connect_replay(NAMES)
