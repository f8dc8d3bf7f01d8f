"""Tells the extension what it needs of Python and torch. Imported once, for its effect."""

import functools
import sys
import threading
import types
from collections import deque

import torch

from actckpt import _frames
from actckpt.runtime import messages, modes, rerun, rng, state, stays, torch_private
from actckpt.runtime.buffers import note_buffers
from actckpt.runtime.inputs import HeldTensorChanged, global_names
from actckpt.runtime.watched import has_same_bytes, own_copy

NAMES = {
    "tensor_type": torch.Tensor,
    "parameter_type": torch.nn.Parameter,
    "module_type": torch.nn.Module,
    "fake_tensor_type": torch_private.fake_tensor_type,
    "storage_type": torch.UntypedStorage,
    # Containers and objects that a region leads to (csrc/frames/structure.h).
    "generator_type": torch.Generator,
    "partial_type": functools.partial,
    "deque_type": deque,
    "namespace_type": types.SimpleNamespace,
    "lock_types": (type(threading.Lock()), type(threading.RLock())),
    # Packages whose objects are left alone: the standard library's, but for collections and namespaces.
    "left_alone": frozenset(sys.stdlib_module_names - {"argparse", "collections", "types"}),
    "global_names": global_names,
    # One rerun of a region at a time.
    "lock_type": threading.RLock,
    # Whether backward may clear what it is given of a saved tensor.
    "alias_rules": stays.alias_rules,
    # Global state that a rerun must find as the forward found it.
    "state_getters": state.GETTERS,
    # Default generators: of the CPU alone, and of the devices of a tuple of arguments.
    "cpu_generators": (torch.default_generator,),
    "generators_of": rng.generators_of_tensors,
    "is_capturing": rng.is_capturing if torch.backends.cuda.is_built() else None,
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
    # Which backward is under way, and what to do when it ends.
    "graph_task_id": torch_private.current_graph_task_id,
    "graph_exec_group": torch_private.current_graph_exec_group,
    "queue_callback": torch_private.queue_callback,
    # Reruns that are not of the common kind.
    "refill": rerun.refill,
    # Buffers that a forward changes.
    "note_buffers": note_buffers,
    # Inference tensors, which have no version.
    "own_copy": own_copy,
    "has_same_bytes": has_same_bytes,
    # Errors.
    "mismatch_error": rerun.mismatch_error,
    "modified_error": messages.saved_tensor_changed,
    "changed_error": HeldTensorChanged,
    "input_error": messages.changed_error,
    "failure": rerun.failure,
    "parameter_error": messages.parameter_error,
    "swap_timeout_error": rng.swap_timeout_error,
    "script_failure": torch_private.SCRIPT_FAILURE,
}

_frames.connect(NAMES)
