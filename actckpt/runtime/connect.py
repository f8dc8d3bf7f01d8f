"""Tells the extension what it needs of Python and torch. Imported once, for its effect."""

import threading

import torch

from actckpt import _frames
from actckpt.runtime import messages, rerun, rng, state, stays, torch_private
from actckpt.runtime.inputs import HeldTensorChanged, changed_error, has_same_bytes, own_copy, parameter_error

NAMES = {
    "tensor_type": torch.Tensor,
    "parameter_type": torch.nn.Parameter,
    "module_type": torch.nn.Module,
    "storage_type": torch.UntypedStorage,
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
    # Which backward is under way, and what to do when it ends.
    "graph_task_id": torch_private.current_graph_task_id,
    "graph_exec_group": torch_private.current_graph_exec_group,
    "queue_callback": torch_private.queue_callback,
    # Reruns that are not of the common kind.
    "refill": rerun.refill,
    # Inference tensors, which have no version.
    "own_copy": own_copy,
    "has_same_bytes": has_same_bytes,
    # Errors.
    "mismatch_error": rerun.mismatch_error,
    "modified_error": messages.saved_tensor_changed,
    "changed_error": HeldTensorChanged,
    "input_error": changed_error,
    "failure": rerun.failure,
    "parameter_error": parameter_error,
    "swap_timeout_error": rng.swap_timeout_error,
    "script_failure": torch_private.SCRIPT_FAILURE,
}

_frames.connect(NAMES)
