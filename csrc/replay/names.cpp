#include "replay/names.h"

namespace actckpt::replay {
namespace {

ReplayNames interned() {
  ReplayNames n{};
  n.untyped_storage = PyUnicode_InternFromString("untyped_storage");
  n.nbytes = PyUnicode_InternFromString("nbytes");
  n.stride = PyUnicode_InternFromString("stride");
  n.storage_offset = PyUnicode_InternFromString("storage_offset");
  n.is_conj = PyUnicode_InternFromString("is_conj");
  n.is_neg = PyUnicode_InternFromString("is_neg");
  n.is_complex = PyUnicode_InternFromString("is_complex");
  n.base = PyUnicode_InternFromString("_base");
  n.as_strided = PyUnicode_InternFromString("as_strided");
  n.is_nested = PyUnicode_InternFromString("is_nested");
  n.is_view = PyUnicode_InternFromString("is_view");
  n.is_plain = PyUnicode_InternFromString("is_plain");
  n.callee = PyUnicode_InternFromString("callee");
  n.tape = PyUnicode_InternFromString("tape");
  n.func = PyUnicode_InternFromString("func");
  n.asks_calls = PyUnicode_InternFromString("asks_calls");
  n.actions_by_id = PyUnicode_InternFromString("actions_by_id");
  n.default_action = PyUnicode_InternFromString("default");
  n.after_call = PyUnicode_InternFromString("after_call");
  n.is_leaf = PyUnicode_InternFromString("is_leaf");
  n.why_input = PyUnicode_InternFromString("an input of the region");
  n.why_unreadable = PyUnicode_InternFromString("made from a tensor whose storage cannot be read");
  n.changed_unseen = PyUnicode_InternFromString("changed_unseen");
  n.another_root = PyUnicode_InternFromString("another_root");
  n.why_never = PyUnicode_InternFromString("why_never");
  n.decide = PyUnicode_InternFromString("decide");
  n.enter = PyUnicode_InternFromString("__enter__");
  n.exit = PyUnicode_InternFromString("__exit__");
  n.clear_after = PyUnicode_InternFromString("clear_after");
  n.for_value = PyUnicode_InternFromString("for_value");
  n.num_replays = PyUnicode_InternFromString("num_replays");
  return n;
}

}  // namespace

ReplayNames& names() {
  static ReplayNames found = interned();
  return found;
}

void connect_replay(const py::dict& given) {
  ReplayNames& n = names();
  const auto keep = [&](const char* name) -> PyObject* {
    py::object value = given[name];
    return value.is_none() ? nullptr : value.release().ptr();
  };
  n.paused = keep("paused");
  n.describe = keep("describe");
  n.record_special = keep("record_special");
  n.pin_dtype = keep("pin_dtype");
  n.begin_audit = keep("begin_audit");
  n.pack_other = keep("pack_other");
  n.unpack_slowly = keep("unpack_slowly");
  n.recompute = keep("recompute");
  n.keep = keep("keep");
  n.below_autograd = keep("below_autograd");
  n.keeps_graph = keep("keeps_graph");
  n.any_autocast_enabled = keep("any_autocast_enabled");
  n.num_function_modes = keep("num_function_modes");
  n.num_recorders = keep("num_recorders");
}

}  // namespace actckpt::replay
