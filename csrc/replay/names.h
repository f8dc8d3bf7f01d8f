// What recording and replay need of Python and torch, looked up once; see actckpt/runtime/replay/connect.py.
#pragma once

#include "frames/python.h"

namespace actckpt::replay {

struct ReplayNames {
  // Interned attribute names.
  PyObject* is_complex;
  PyObject* as_strided;
  PyObject* is_view;
  PyObject* is_plain;
  PyObject* is_elementwise;
  PyObject* is_recorded;
  PyObject* func;
  PyObject* callee;
  PyObject* tape;
  PyObject* asks_calls;
  PyObject* actions_by_id;
  PyObject* default_action;
  PyObject* after_call;
  PyObject* name;
  PyObject* made_by_nothing;  // what reports call the operator of inputs
  PyObject* made_unseen;      // and of what no recorded operator made inside of the region
  PyObject* no_reason;
  PyObject* why_read;  // what reports say of what was not saved and is held
  PyObject* why_input;  // what reports say of inputs
  PyObject* why_higher_order;  // and of what higher-order operators make
  PyObject* why_unreadable;  // and of what is made from tensors without a storage
  PyObject* changed_unseen;
  PyObject* another_root;
  PyObject* why_never;
  PyObject* decide;
  PyObject* enter;
  PyObject* exit;
  PyObject* clear_after;
  PyObject* for_value;
  PyObject* globals;
  PyObject* module_name;  // a module's global of its own name
  PyObject* code_name;
  PyObject* dispatch_name;  // of the handler of a dispatch mode
  PyObject* torch_prefix;   // of the names of torch's modules

  // Set by `connect_replay`.
  PyObject* describe;         // func -> Operator, or HigherOrder
  PyObject* record_special;   // (tape, operator, args, kwargs) -> result
  PyObject* note_wrappers;    // (tape, arguments)
  PyObject* begin_audit;      // (tape, handle, place, tensor)
  PyObject* pack_other;       // (tape, tensor, value or None) -> what autograd holds
  PyObject* unpack_slowly;    // (handle) -> tensor
  PyObject* recompute;        // Action.RECOMPUTE
  PyObject* keep;             // Action.KEEP
  PyObject* why_inference;    // what reports say of what is made from inference tensors
  PyObject* below_autograd;   // null where torch has no such guard
  PyObject* keeps_graph;      // null where torch does not tell
  PyObject* any_autocast_enabled;
  PyObject* num_function_modes;
  PyObject* recording;        // set: tapes whose recorders are active, in any thread
  PyObject* made_by_function;   // (tape, value, node)
  PyObject* saved_by_function;  // (tape, value, tensor)
  PyObject* function_type;      // of the nodes of autograd.Functions
  PyObject* apply_code;         // of `autograd.Function.apply`
  PyObject* compiled_prefix;    // of the names of modules of compiled code
};

ReplayNames& names();

void connect_replay(const py::dict& given);

}  // namespace actckpt::replay
