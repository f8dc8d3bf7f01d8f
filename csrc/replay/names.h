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
  PyObject* func;
  PyObject* callee;
  PyObject* tape;
  PyObject* asks_calls;
  PyObject* actions_by_id;
  PyObject* default_action;
  PyObject* after_call;
  PyObject* name;
  PyObject* made_by_nothing;  // what reports call the operator of inputs
  PyObject* no_reason;
  PyObject* why_read;  // what reports say of what was not saved and is held
  PyObject* why_input;  // what reports say of inputs
  PyObject* why_unreadable;  // and of what is made from tensors without a storage
  PyObject* changed_unseen;
  PyObject* another_root;
  PyObject* why_never;
  PyObject* decide;
  PyObject* enter;
  PyObject* exit;
  PyObject* clear_after;
  PyObject* for_value;

  // Set by `connect_replay`.
  PyObject* paused;           // dict: threads in which recorders stand aside
  PyObject* describe;         // func -> Operator, None for what is not recorded
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
  PyObject* num_recorders;    // [number of recorders that are active in the process]
};

ReplayNames& names();

void connect_replay(const py::dict& given);

}  // namespace actckpt::replay
