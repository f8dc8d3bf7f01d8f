"""The only connection from Python to the C++ extension: the objects of this package and torch that it uses.

Imported once, for its effect.
"""

import threading
from typing import Any

import torch

from actckpt import _C, config
from actckpt._core import devices, extensions, messages, modes, random_state, rescue, sites, state, torch_private
from actckpt._core.tensor_changes import has_same_bytes, own_copy
from actckpt._offload import notices, owned_memory, reading, session, stores
from actckpt._replay import (
    active_region,
    aliases,
    audit,
    collectives,
    execute,
    outer_hooks,
    recorder,
    routing,
    saved_tensor_hooks,
    schedule,
    unrecorded,
    windows,
    wrappers,
)
from actckpt._replay.operators import operator_of
from actckpt._rerun import region
from actckpt._rerun.buffers import note_buffers
from actckpt.action import Action

#: By the names in csrc/core/names.h; None if torch has no such thing.
NAMES: dict[str, Any] = {
    "tensor_type": torch.Tensor,
    "parameter_type": torch.nn.Parameter,
    "module_type": torch.nn.Module,
    "module_call": torch.nn.Module.__call__,
    "fake_tensor_type": torch_private.fake_tensor_type,
    "storage_type": torch.UntypedStorage,
    "generator_type": torch.Generator,
    # The lock that serializes reruns of a region.
    "lock_type": threading.RLock,
    # Whether backward may clear a saved tensor that it gets.
    "clears_saved": extensions.clears_saved,
    # Global state that reruns restore.
    "state_getters": state.GETTERS,
    "with_details": state.with_details,
    # Default generators: the CPU's, and those that a call with these arguments may draw from.
    "cpu_generators": (torch.default_generator,),
    "generators_of": random_state.generators_of_call,
    "is_capturing": devices.is_capturing,
    # Hooks and grad mode.
    "top_hooks": torch_private.top_hooks,
    "push_hooks": torch_private.push_hooks,
    "pop_hooks": torch_private.pop_hooks,
    "is_grad_enabled": torch.is_grad_enabled,
    "set_grad_enabled": torch_private.set_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    # Dispatch modes.
    "num_dispatch_modes": torch_private.num_dispatch_modes,
    "take_off_modes": modes.take_off,
    "put_back_modes": modes.put_back,
    "tangents_enabled": torch_private.tangents_enabled,
    "set_tangents_enabled": torch_private.set_tangents_enabled,
    "unknown_modes": modes.unknown,
    # The current backward, and callbacks at its end.
    "graph_task_id": torch_private.current_graph_task_id,
    "reads_filled_late": torch_private.reads_filled_late,
    "graph_exec_group": torch_private.current_graph_exec_group,
    "queue_callback": torch_private.queue_callback,
    # Reruns that need Python.
    "rerun_in_python": region.rerun_in_python,
    # Buffers that a forward changes.
    "note_buffers": note_buffers,
    # Inference tensors, which have no version counter.
    "own_copy": own_copy,
    "has_same_bytes": has_same_bytes,
    # Errors.
    "mismatch_error": region.mismatch_error,
    "modified_error": messages.saved_tensor_changed,
    "changed_error": messages.HeldTensorChanged,
    "input_error": messages.changed_error,
    "failure": region.failure,
    "parameter_error": messages.parameter_error,
    # Backward work that runs out of memory.
    "may_run_again": rescue.may_run_again,
    "release_caches": rescue.release_caches,
    "add_first_error": rescue.add_first_error,
    "num_operations": rescue.num_operations,
    "swap_timeout_error": random_state.swap_timeout_error,
    "script_failure": torch_private.SCRIPT_FAILURE,
    # Offload hooks.
    "store_for": stores.store_for,
    "stores": stores._stores,
    "settings": vars(config),
    "is_owned": owned_memory.is_owned,
    "excludes_from_offload": extensions.excludes_from_offload,
    "pack_parts": session.pack_parts,
    "is_tracing": torch_private.is_tracing,
    "is_unshared": torch_private.is_unshared,
    "tell_of_writes": notices.tell_of_writes,
    "tell_of_disk": notices.tell_of_disk,
    "tell_kept": notices.tell_kept,
    "max_inflight": reading.max_inflight,
    "changed_in_place_error": messages.changed_in_place,
    "freed_error": session.freed_error,
    "replaced_error": session.replaced_error,
    "filled_late_error": session.filled_late_error,
    "empty": torch.empty,
    "strided": torch.strided,
    "uint8": torch.uint8,
    # Recording and replay.
    "describe": operator_of,
    "record_special": recorder.record_special,
    "note_wrappers": wrappers.note,
    "hold_indices": routing.hold_indices,
    "begin_audit": audit.begin_audit,
    "pack_other": saved_tensor_hooks.pack_other,
    "unpacked_inside": saved_tensor_hooks.unpacked_inside,
    "audited": audit.audited,
    "saved_piece": outer_hooks.saved_piece,
    "read_stored": aliases.read_stored,
    "check_watched": aliases.check_watched,
    "watched_type": aliases.Watched,
    "choose_replay": schedule.choose,
    "least_growth_bytes": 64 << 10,  # to examine fewer takes longer than operators on them
    "small_window_bytes": windows.SMALL_BYTES,
    "replay_specially": execute.replay_specially,
    "private_memory": execute.private_memory,
    "lost_error": execute.lost_error,
    "resized_error": aliases.resized_error,
    "changed_after_error": aliases.changed_after_error,
    "other_bytes_error": execute.other_bytes_error,
    "order_error": collectives.order_error,
    "keep": Action.KEEP,
    "offload": Action.OFFLOAD,
    "recompute": Action.RECOMPUTE,
    "below_autograd": torch_private.below_autograd,
    "keeps_graph": torch_private.keeps_graph,
    "any_autocast_enabled": torch_private.any_autocast_enabled,
    "num_function_modes": torch_private.num_function_modes,
    "exchange_api": torch_private.exchange_api,
    "recording": active_region.recording,
    "made_by_function": unrecorded.made_by_function,
    "saved_by_function": unrecorded.saved_by_function,
    "function_type": torch_private.function_node_type,
    "apply_code": torch_private.apply_code,
    "compiled_prefix": torch_private.COMPILED_PREFIX,
    "compiler_prefix": torch_private.COMPILER_PREFIX,
    # Names of the modules whose calls run operators.
    "module_call_code": torch.nn.Module.__call__.__code__,
    "qualified_name": sites.qualified_name,
    "is_function_mode_enabled": torch_private.is_function_mode_enabled,
}

for _given in NAMES.values():
    if str(getattr(_given, "__module__", None)).startswith("actckpt."):
        torch_private.untraced(_given)
_C.connect(NAMES)
