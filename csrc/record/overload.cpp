#include "record/overload.h"

#include <unordered_map>
#include <utility>

namespace actckpt::replay {

const Overload& overload_of(PyObject* func) {
  static auto* found = new std::unordered_map<PyObject*, Overload>();
  const auto at = found->find(func);
  if (at != found->end()) return at->second;
  Overload entry;
  entry.func = py::reinterpret_borrow<py::object>(func);
  entry.op = call(names().describe, func);
  entry.name = attribute(entry.op.ptr(), names().name);
  entry.is_recorded = is_true(entry.op.ptr(), names().is_recorded);
  entry.callee = &callee_of(entry.op.ptr());
  entry.makes_one = is_true(entry.op.ptr(), names().makes_one);
  entry.is_routed = PyObject_IsTrue(attribute(entry.op.ptr(), names().routed_by).ptr()) == 1;
  if (entry.is_recorded) {
    entry.is_view = is_true(entry.op.ptr(), names().is_view);
    entry.is_plain = is_true(entry.op.ptr(), names().is_plain);
    entry.is_plain_if_kept = is_true(entry.op.ptr(), names().is_plain_if_kept);
    if (is_true(entry.op.ptr(), names().is_elementwise)) entry.which = Numerics::kOfElements;
  }
  return found->emplace(func, std::move(entry)).first->second;
}

}  // namespace actckpt::replay
