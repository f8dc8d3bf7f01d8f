// Python and torch objects that the extension uses: interned names, and the objects passed to `connect`. Looked up once
// and held for the life of the process.
#pragma once

#include <pybind11/pybind11.h>

namespace actckpt {

// Interned text: X(field, text).
#define ACTCKPT_INTERNED(X) \
  X(acquire, "acquire") \
  X(actions, "actions") \
  X(after_call, "after_call") \
  X(another_version_alias, "another_version_alias") \
  X(are_as_found, "are_as_found") \
  X(ask_policy, "ask_policy") \
  X(args, "args") \
  X(as_strided, "as_strided") \
  X(asks_calls, "asks_calls") \
  X(begin_rerun, "begin_rerun") \
  X(audit_late, "audit_late") \
  X(buffers, "_buffers") \
  X(callee, "callee") \
  X(changed_unseen, "changed_unseen") \
  X(check, "check") \
  X(code_name, "co_name") \
  X(conj, "conj") \
  X(copy, "copy_") \
  X(cpu, "cpu") \
  X(cuda, "cuda") \
  X(data, "data") \
  X(default_action, "default") \
  X(detach, "detach") \
  X(device, "device") \
  X(dict, "__dict__") \
  X(direct, "direct") \
  X(dispatch_name, "__torch_dispatch__") /* of the handler of a dispatch mode */ \
  X(dtype, "dtype") \
  X(dunder_name, "__name__") \
  X(enter, "__enter__") \
  X(exit, "__exit__") \
  X(fetch, "fetch") \
  X(find, "find") \
  X(flatten, "__tensor_flatten__") \
  X(for_value, "for_value") \
  X(forward_done, "forward_done") \
  X(found, "found") \
  X(function, "function") \
  X(generation, "generation") \
  X(generators, "generators") \
  X(get_state, "get_state") \
  X(globals, "f_globals") \
  X(index, "index") /* of a device */ \
  X(is_away, "is_away") \
  X(is_complex, "is_complex") \
  X(is_elementwise, "is_elementwise") \
  X(is_obtainable, "is_obtainable") \
  X(is_full_backward_hook, "_is_full_backward_hook") \
  X(is_plain, "is_plain") \
  X(is_plain_if_kept, "is_plain_if_kept") \
  X(is_recorded, "is_recorded") \
  X(is_swapped, "is_swapped") \
  X(is_view, "is_view") \
  X(kwargs, "kwargs") \
  X(leave_out_audit, "leave_out_audit") \
  X(locals, "f_locals") \
  X(makes_one, "makes_one") \
  X(made_by_nothing, "(input)")    /* operator name of inputs in reports */ \
  X(made_unseen, "(not recorded)") /* and of values made without a recorded operator */ \
  X(modules, "_modules") \
  X(move, "offload") /* method of a tape */ \
  X(name, "name") \
  X(offloads_inputs_from, "offloads_inputs_from") \
  X(neg_view, "_neg_view") \
  X(no_reason, "") \
  X(note, "note") \
  X(note_again, "note_again") \
  X(note_opaque, "note_opaque") \
  X(num_returned, "num_returned") \
  X(parameters, "_parameters") \
  X(prefetch, "prefetch") \
  X(put, "put") \
  X(reached_modules, "modules") \
  X(record_stream, "record_stream") \
  X(release, "release") \
  X(requires_grad_, "requires_grad_") \
  X(restore, "restore") \
  X(routed_by, "routed_by") \
  X(saved_again, "saved_again") \
  X(self_name, "self") \
  X(set, "set_") \
  X(set_state, "set_state") \
  X(tape, "tape") \
  X(tensor_positions, "tensor_positions") \
  X(torch_prefix, "torch.") /* prefix of torch's module names */ \
  X(training, "training") \
  X(type, "type") /* of a device */ \
  X(unload, "unload") \
  X(unpack, "unpack") \
  X(watching, "watching") \
  X(why_higher_order, "made by a higher-order operator") /* reason in reports */ \
  X(why_inference, "made from an inference tensor, which has no version counter") \
  X(why_input, "an input of the region") /* reason in reports */ \
  X(why_never, "why_never") \
  X(why_larger, "recomputing it would hold more bytes")                /* reason in reports: kept candidates */ \
  X(why_read, "others are replayed from it")                           /* reason in reports: held, not saved */ \
  X(why_routing, "it says where data goes, or how much of it")         /* see actckpt/_replay/routing.py */ \
  X(why_unreadable, "made from a tensor whose storage cannot be read") /* reason in reports */

// By the names in actckpt/_bind.py, which documents them: X(field). Null if torch has no such thing.
#define ACTCKPT_CONNECTED(X) \
  X(tensor_type) \
  X(parameter_type) \
  X(module_call) \
  X(module_type) \
  X(fake_tensor_type) \
  X(storage_type) \
  X(generator_type) \
  X(lock_type) \
  X(clears_saved) /* list of callables: see actckpt/_core/extensions.py */ \
  X(state_getters) \
  X(cpu_generators) \
  X(top_hooks) \
  X(push_hooks) \
  X(pop_hooks) \
  X(is_grad_enabled) \
  X(set_grad_enabled) \
  X(is_inference_mode_enabled) \
  X(num_dispatch_modes) \
  X(take_off_modes) /* -> argument of `put_back_modes` */ \
  X(put_back_modes) \
  X(tangents_enabled) \
  X(set_tangents_enabled) \
  X(unknown_modes) /* -> tuple of those that may change results */ \
  X(graph_task_id) \
  X(reads_filled_late) /* -> whether the current node may read a tensor filled after saving */ \
  X(graph_exec_group)  /* null where torch has none */ \
  X(queue_callback) \
  X(is_capturing) \
  X(generators_of) \
  X(with_details)    /* (results of the state getters) -> the same with details */ \
  X(rerun_in_python) /* (recomputed, function, args, kwargs or None) */ \
  X(note_buffers) \
  X(may_run_again) /* (error, operations before a rerun): whether the failed work runs once more */ \
  X(release_caches) \
  X(add_first_error) \
  X(num_operations) \
  X(swap_timeout_error) \
  X(mismatch_error) \
  X(modified_error) \
  X(changed_error) \
  X(own_copy) \
  X(has_same_bytes) \
  X(input_error) \
  X(failure) \
  X(parameter_error) \
  X(script_failure)        /* TorchScript's error text if a hook raised */ \
  X(store_for)             /* (type of device) -> store */ \
  X(stores)                /* dict: type of device -> (generation of its settings, store) */ \
  X(settings)              /* dict with the current `generation` */ \
  X(is_owned)              /* by a module whose forward runs */ \
  X(excludes_from_offload) /* list of callables: see actckpt/_core/extensions.py */ \
  X(pack_parts)            /* of a subclass with inner tensors */ \
  X(is_tracing) \
  X(is_unshared)    /* (tensor) -> whether only this object refers to it and to its memory */ \
  X(tell_of_writes) /* (DeviceStats): warns of failed writes */ \
  X(tell_of_disk)   /* (Accelerator): warns that its tensors go to disk */ \
  X(tell_kept)      /* (DeviceEngine, Kept, bytes that stay, Accelerator or None): warns why */ \
  X(max_inflight) \
  X(changed_in_place_error) \
  X(freed_error) \
  X(replaced_error)    /* (bytes) */ \
  X(filled_late_error) /* (shape, dtype) */ \
  X(empty)             /* torch.empty */ \
  X(exchange_api) \
  X(strided)             /* torch.strided */ \
  X(uint8)               /* torch.uint8 */ \
  X(describe)            /* func -> Operator, or HigherOrder */ \
  X(record_special)      /* (tape, operator, args, kwargs, action or None) -> result */ \
  X(note_wrappers)       /* (tape, arguments) */ \
  X(hold_indices)        /* (tape, operator, args, kwargs or None) */ \
  X(begin_audit)         /* (tape, handle, place, tensor) */ \
  X(pack_other)          /* (tape, tensor, value or None) -> packed object */ \
  X(unpacked_inside)     /* (tape, value): before a backward inside an open region reads it */ \
  X(audited)             /* (handle, tensor) -> tensor */ \
  X(saved_piece)         /* (stored, window) -> the saved tensor from outer hooks, or None */ \
  X(read_stored)         /* (stored, window or None) -> a tensor on the bytes */ \
  X(check_watched)       /* (stored, window or None): raises if the bytes changed */ \
  X(watched_type)        /* type of stored and watched bytes */ \
  X(choose_replay)       /* (tape, graph, order, all_stay, task, clock) -> order, retained values */ \
  X(least_growth_bytes)  /* see record/candidates.h; 0: examine after every kept value */ \
  X(small_window_bytes)  /* bytes of a replay that stay whatever the window */ \
  X(replay_specially)    /* (step, args, kwargs or None) -> result */ \
  X(private_memory)      /* (value, tensor or None) -> memory for a step to write to */ \
  X(lost_error)          /* (value) */ \
  X(resized_error)       /* (held, value) */ \
  X(changed_after_error) /* (tensor, expected version) */ \
  X(other_bytes_error)   /* (value, result) */ \
  X(order_error)         /* (value) */ \
  X(recompute)           /* Action.RECOMPUTE */ \
  X(keep)                /* Action.KEEP */ \
  X(offload)             /* Action.OFFLOAD */ \
  X(below_autograd) \
  X(keeps_graph) \
  X(any_autocast_enabled) \
  X(num_function_modes) \
  X(is_function_mode_enabled) \
  X(recording)         /* set: tapes that are recording, in any thread */ \
  X(made_by_function)  /* (tape, value, node) */ \
  X(saved_by_function) /* (tape, value, tensor) */ \
  X(function_type)     /* type of autograd.Function nodes */ \
  X(apply_code)        /* of `autograd.Function.apply` */ \
  X(compiled_prefix)   /* module name prefix of compiled code */ \
  X(compiler_prefix)   /* module name prefix of callers of compiled code */ \
  X(module_call_code)  /* of `Module.__call__` */ \
  X(qualified_name)    /* (outermost module, module) -> qualified name */

struct Names {
#define ACTCKPT_TEXT_FIELD(name, text) PyObject* name = nullptr;
#define ACTCKPT_FIELD(name) PyObject* name = nullptr;
  ACTCKPT_INTERNED(ACTCKPT_TEXT_FIELD)
  ACTCKPT_CONNECTED(ACTCKPT_FIELD)
#undef ACTCKPT_TEXT_FIELD
#undef ACTCKPT_FIELD
  PyObject* keyword_must = nullptr;           // ("must",): keyword names of a store's `put`
  PyObject* keywords_dtype_device = nullptr;  // ("dtype", "device"): of `torch.empty`
};

extern Names the_names;
inline const Names& names() { return the_names; }

// Interns the names; called once, before anything else of the extension runs.
void intern_names();

// Takes the objects from a dict; unknown and missing names are errors.
void connect_names(const pybind11::dict& given);

}  // namespace actckpt
