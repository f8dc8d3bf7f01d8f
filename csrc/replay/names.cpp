#include "replay/names.h"

#include "replay/geometry.h"

namespace actckpt::replay {
namespace {

ReplayNames interned() {
  ReplayNames n{};
  n.is_complex = PyUnicode_InternFromString("is_complex");
  n.as_strided = PyUnicode_InternFromString("as_strided");
  n.is_view = PyUnicode_InternFromString("is_view");
  n.is_plain = PyUnicode_InternFromString("is_plain");
  n.is_elementwise = PyUnicode_InternFromString("is_elementwise");
  n.is_recorded = PyUnicode_InternFromString("is_recorded");
  n.callee = PyUnicode_InternFromString("callee");
  n.tape = PyUnicode_InternFromString("tape");
  n.func = PyUnicode_InternFromString("func");
  n.asks_calls = PyUnicode_InternFromString("asks_calls");
  n.actions_by_id = PyUnicode_InternFromString("actions_by_id");
  n.default_action = PyUnicode_InternFromString("default");
  n.after_call = PyUnicode_InternFromString("after_call");
  n.name = PyUnicode_InternFromString("name");
  n.made_by_nothing = PyUnicode_InternFromString("(input)");
  n.made_unseen = PyUnicode_InternFromString("(not recorded)");
  n.no_reason = PyUnicode_InternFromString("");
  n.why_read = PyUnicode_InternFromString("others are replayed from it");
  n.why_input = PyUnicode_InternFromString("an input of the region");
  n.why_higher_order = PyUnicode_InternFromString("made by a higher-order operator");
  n.why_unreadable = PyUnicode_InternFromString("made from a tensor whose storage cannot be read");
  n.changed_unseen = PyUnicode_InternFromString("changed_unseen");
  n.another_root = PyUnicode_InternFromString("another_root");
  n.why_never = PyUnicode_InternFromString("why_never");
  n.decide = PyUnicode_InternFromString("decide");
  n.enter = PyUnicode_InternFromString("__enter__");
  n.exit = PyUnicode_InternFromString("__exit__");
  n.clear_after = PyUnicode_InternFromString("clear_after");
  n.for_value = PyUnicode_InternFromString("for_value");
  n.globals = PyUnicode_InternFromString("f_globals");
  n.module_name = PyUnicode_InternFromString("__name__");
  n.code_name = PyUnicode_InternFromString("co_name");
  n.dispatch_name = PyUnicode_InternFromString("__torch_dispatch__");
  n.torch_prefix = PyUnicode_InternFromString("torch.");
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
  n.describe = keep("describe");
  n.record_special = keep("record_special");
  n.note_wrappers = keep("note_wrappers");
  n.begin_audit = keep("begin_audit");
  n.pack_other = keep("pack_other");
  n.unpack_slowly = keep("unpack_slowly");
  n.recompute = keep("recompute");
  n.keep = keep("keep");
  n.why_inference = keep("why_inference");
  n.below_autograd = keep("below_autograd");
  n.keeps_graph = keep("keeps_graph");
  n.any_autocast_enabled = keep("any_autocast_enabled");
  n.num_function_modes = keep("num_function_modes");
  n.recording = keep("recording");
  n.made_by_function = keep("made_by_function");
  n.saved_by_function = keep("saved_by_function");
  n.function_type = keep("function_type");
  n.apply_code = keep("apply_code");
  n.compiled_prefix = keep("compiled_prefix");
  connect_exchange(keep("exchange_api"));
}

}  // namespace actckpt::replay
