#include "hooks/names.h"

namespace actckpt {
namespace {

HookNames interned() {
  HookNames n{};
  n.base = PyUnicode_InternFromString("_base");
  n.data = PyUnicode_InternFromString("data");
  n.data_ptr = PyUnicode_InternFromString("data_ptr");
  n.element_size = PyUnicode_InternFromString("element_size");
  n.fetch = PyUnicode_InternFromString("fetch");
  n.is_conj = PyUnicode_InternFromString("is_conj");
  n.is_cuda = PyUnicode_InternFromString("is_cuda");
  n.is_leaf = PyUnicode_InternFromString("is_leaf");
  n.is_neg = PyUnicode_InternFromString("is_neg");
  n.is_nested = PyUnicode_InternFromString("is_nested");
  n.is_quantized = PyUnicode_InternFromString("is_quantized");
  n.layout = PyUnicode_InternFromString("layout");
  n.nbytes = PyUnicode_InternFromString("nbytes");
  n.conj = PyUnicode_InternFromString("conj");
  n.prefetch = PyUnicode_InternFromString("prefetch");
  n.put = PyUnicode_InternFromString("put");
  n.saved_again = PyUnicode_InternFromString("saved_again");
  n.set = PyUnicode_InternFromString("set_");
  n.storage_offset = PyUnicode_InternFromString("storage_offset");
  n.start = PyUnicode_InternFromString("start");
  n.stride = PyUnicode_InternFromString("stride");
  n.unload = PyUnicode_InternFromString("unload");
  n.unpack = PyUnicode_InternFromString("unpack");
  n.untyped_storage = PyUnicode_InternFromString("untyped_storage");
  n.must = PyTuple_Pack(1, PyUnicode_InternFromString("must"));
  n.timing = PyUnicode_InternFromString("timing");
  n.dtype_device = PyTuple_Pack(2, python().dtype, python().device);
  return n;
}

long long to_integer(const py::object& value) {
  const long long result = PyLong_AsLongLong(value.ptr());
  if (result == -1 && PyErr_Occurred() != nullptr) throw_pending();
  return result;
}

}  // namespace

HookNames& names() {
  static HookNames all = interned();
  return all;
}

void connect_hooks(const py::dict& given) {
  HookNames& n = names();
  const auto keep = [&](const char* name) -> PyObject* {
    py::object value = given[name];
    return value.release().ptr();
  };
  n.backend = keep("backend");
  n.guard = keep("guard");
  n.is_owned = keep("is_owned");
  n.stay_rules = keep("stay_rules");
  n.must_stay = keep("must_stay");
  n.pack_otherwise = keep("pack_otherwise");
  n.join = keep("join");
  n.learnt_order = keep("learnt_order");
  n.note_order = keep("note_order");
  n.max_inflight = keep("max_inflight");
  n.changed_error = keep("changed_error");
  n.freed_error = keep("freed_error");
  n.empty = keep("empty");
  n.strided = keep("strided");
  n.uint8 = keep("uint8");
}

long long integer(PyObject* object, PyObject* attribute_name) {
  return to_integer(attribute(object, attribute_name));
}

long long integer_of_call(PyObject* object, PyObject* method) {
  return to_integer(call_method(object, method));
}

}  // namespace actckpt
