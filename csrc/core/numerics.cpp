#include "core/numerics.h"

#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace actckpt {
namespace {

// How a setting is read: by calling a function or, for a flag in Python code, from the module's namespace.
class Getter {
 public:
  Getter(PyObject* source, PyObject* args) : source_(Py_NewRef(source)), args_(Py_NewRef(args)) {
    // Call torch functions without arguments as the interpreter does.
    if (PyCFunction_CheckExact(source) && PyCFunction_GET_FLAGS(source) == METH_NOARGS) {
      function_ = PyCFunction_GET_FUNCTION(source);
    }
  }

  // A new reference; null with a Python error pending.
  PyObject* operator()() const {
    if (function_ != nullptr) return function_(PyCFunction_GET_SELF(source_), nullptr);
    if (!PyDict_CheckExact(source_)) return PyObject_Call(source_, args_, nullptr);
    PyObject* item = PyDict_GetItemWithError(source_, PyTuple_GET_ITEM(args_, 0));
    return item != nullptr || PyErr_Occurred() != nullptr ? Py_XNewRef(item) : Py_NewRef(Py_None);
  }

 private:
  PyObject* source_;  // never released
  PyObject* args_;
  PyCFunction function_ = nullptr;
};

struct Settings {
  std::vector<Getter> getters;
  std::size_t num_of_elements = 0;         // settings for `kOfElements` come first
  PyObject* last[2] = {nullptr, nullptr};  // last read tuples, by `Numerics`; null: none
  PyObject* known = nullptr;               // dict of all tuples, keyed by themselves
};

Settings& settings() {
  static auto* found = new Settings();  // never destroyed: its references die with the interpreter
  return *found;
}

// Whether this thread flushes denormal numbers to zero (`torch.set_flush_denormal`).
bool flushes_denormals() noexcept {
#if defined(__x86_64__)
  constexpr unsigned int kFlushToZero = 1U << 15, kDenormalsAreZero = 1U << 6;
  return (_mm_getcsr() & (kFlushToZero | kDenormalsAreZero)) != 0;
#elif defined(__aarch64__)
  constexpr unsigned long long kFlushToZero = 1ULL << 24;
  unsigned long long control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return (control & kFlushToZero) != 0;
#else
  return false;  // torch cannot set it here
#endif
}

py::object read(const Getter& getter) {
  PyObject* value = getter();
  if (value == nullptr) throw py::error_already_set();
  auto found = py::reinterpret_steal<py::object>(value);
  return PyList_CheckExact(value) ? py::tuple(found) : std::move(found);
}

// The shared tuple of equal settings; borrowed, never released.
PyObject* read_all(Numerics which) {
  const Settings& s = settings();
  const std::size_t count = which == Numerics::kAll ? s.getters.size() : s.num_of_elements;
  py::tuple found(count);
  for (std::size_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i), read(s.getters[i]).release().ptr());
  }
  PyObject* known = PyDict_SetDefault(s.known, found.ptr(), found.ptr());
  if (known == nullptr) throw py::error_already_set();
  return known;
}

void connect_getters(const py::list& getters, std::size_t num_of_elements) {
  Settings& s = settings();
  s.getters.clear();
  for (const py::handle item : getters) {
    s.getters.emplace_back(PyTuple_GET_ITEM(item.ptr(), 0), PyTuple_GET_ITEM(item.ptr(), 1));
  }
  s.num_of_elements = num_of_elements;
  s.last[0] = s.last[1] = nullptr;
  s.known = py::dict().release().ptr();
}

PyObject* numerics(PyObject*, PyObject*) {
  return guarded([] { return numerics_now(Numerics::kAll).release().ptr(); });
}

PyObject* are_numerics_function(PyObject*, PyObject* noted) {
  return guarded([&] { return PyBool_FromLong(are_numerics(noted) ? 1 : 0); });
}

PyObject* flushes_denormals_function(PyObject*, PyObject*) { return PyBool_FromLong(flushes_denormals() ? 1 : 0); }

PyMethodDef numerics_functions[] = {
    {"numerics", numerics, METH_NOARGS, "All settings that change numbers; equal ones are one tuple."},
    {"are_numerics", are_numerics_function, METH_O, "are_numerics(noted): whether they are still those of a tuple."},
    {"flushes_denormals", flushes_denormals_function, METH_NOARGS, "What torch.set_flush_denormal was told."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

py::object numerics_now(Numerics which) {
  PyObject*& last = settings().last[which == Numerics::kAll ? 1 : 0];
  if (last == nullptr || !are_numerics(last)) last = read_all(which);
  return py::reinterpret_borrow<py::object>(last);
}

bool are_numerics(PyObject* noted) {
  const std::vector<Getter>& getters = settings().getters;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(noted); ++i) {
    const py::object now = read(getters[static_cast<std::size_t>(i)]);
    PyObject* before = PyTuple_GET_ITEM(noted, i);
    const int equal = now.ptr() == before ? 1 : PyObject_RichCompareBool(now.ptr(), before, Py_EQ);
    if (equal < 0) throw py::error_already_set();
    if (equal == 0) return false;
  }
  return true;
}

void add_numerics_functions(py::module_& module) {
  module.def(
      "connect_numerics", connect_getters, py::arg("getters"), py::arg("num_of_elements"),
      "Tell how settings are read, as (function or dict, arguments); those for elementwise operators stand first.");
  if (PyModule_AddFunctions(module.ptr(), numerics_functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
