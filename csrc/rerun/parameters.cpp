#include "rerun/parameters.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/collected.h"
#include "core/python.h"
#include "core/reads.h"

namespace actckpt {
namespace {

// A strong reference to the value of a key: user code may run during the lookup and remove it. Null: none.
py::object item_of(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(found);
}

// A module's attributes, without its `__getattr__`, which takes longer than reading a tensor; for a proxy of a module,
// those that it returns.
py::object dict_of(PyObject* module) {
  if (!is_of_type(module, names().module_type)) return attribute(module, names().dict);
  return owned(PyObject_GenericGetDict(module, nullptr));
}

// A dict of the current entries of a ScriptModule: its parameters and modules are in C++.
py::object dict_of_script(const py::object& entries) {
  py::dict copied;
  const py::object items = owned(PyObject_CallMethod(entries.ptr(), "items", nullptr));
  if (PyDict_MergeFromSeq2(copied.ptr(), items.ptr(), 1) < 0) throw py::error_already_set();
  return std::move(copied);
}

bool is_script(PyObject* entries) { return !PyDict_Check(entries) && PyObject_HasAttrString(entries, "items") == 1; }

// A module's dict of parameters, buffers or modules; null if it has none.
py::object entries_of(const py::object& attributes, PyObject* name) {
  py::object found = item_of(attributes.ptr(), name);
  if (found && name != names().buffers && is_script(found.ptr())) found = dict_of_script(found);
  const bool has_entries = found && PyDict_Check(found.ptr()) && PyDict_GET_SIZE(found.ptr()) > 0;
  return has_entries ? found : py::object();
}

bool counts(PyObject* parameter) { return is_plain_tensor(parameter) && reads().requires_grad.is_true(parameter); }

bool has_same_bytes(const py::object& copy, PyObject* parameter) {
  PyObject* both[] = {copy.ptr(), parameter};
  return owned(PyObject_Vectorcall(names().has_same_bytes, both, 2, nullptr)).ptr() == Py_True;
}

// Whether this function, of a bound method, calls the module as a whole.
bool is_call_or_forward(PyObject* function) {
  if (function == names().module_call) return true;
  if (!PyFunction_Check(function)) return false;
  const py::object name = attribute(function, names().dunder_name);
  return PyUnicode_CompareWithASCIIString(name.ptr(), "forward") == 0 ||
         PyUnicode_CompareWithASCIIString(name.ptr(), "__call__") == 0;
}

bool is_module(PyObject* object) { return is_instance(object, names().module_type); }

// Whether `found` replaced `value`, which the forward left, and a rerun needs `value`.
bool has_replaced(PyObject* found, PyObject* value) {
  if (found == value || found == nullptr) return false;
  if (is_plain_tensor(value)) return found == Py_None || is_plain_tensor(found);
  return value == Py_None ? is_plain_tensor(found) : is_module(value) && is_module(found);
}

// Maximum number of elements examined in a list, tuple or dict attribute.
constexpr Py_ssize_t kMostLookedAt = 64;

bool is_generator(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  if (reinterpret_cast<PyObject*>(type) == names().generator_type) return true;
  // Types not made by a class statement are no subclasses of torch's; checking that takes time.
  return PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) != 0 && is_of_type(value, names().generator_type);
}

// Whether a key is one of the attributes that every module has, which are no generators.
bool is_of_every_module(PyObject* key) noexcept {
  return key == names().parameters || key == names().modules || key == names().buffers ||
         key == names().is_full_backward_hook;
}

void append(py::object* list, PyObject* item) {
  if (!*list) *list = py::list();
  if (PyList_Append(list->ptr(), item) < 0) throw py::error_already_set();
}

// Capacity reserved at once: most regions have no more modules and parameters.
constexpr std::size_t kFew = 8;

// Owned by a Python Region.
using Handle = std::shared_ptr<Parameters>;

}  // namespace

Parameters::Parameters(PyObject* function, PyObject* others) {
  PyObject* module = PyMethod_Check(function) ? PyMethod_GET_SELF(function) : function;
  if (is_module(module)) {
    root_ = py::reinterpret_borrow<py::object>(module);
    is_root_called_ = module == function || is_call_or_forward(PyMethod_GET_FUNCTION(function));
  }
  if (others != nullptr && PyList_GET_SIZE(others) > 0) {
    others_ = py::reinterpret_borrow<py::object>(others);
  }
  walk_roots(false);
  sum_before_ = sum_;
}

void Parameters::walk_roots(bool notes) {
  sum_ = 0;
  if (root_) walk(root_.ptr(), is_root_called_, notes);
  if (!others_) return;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others_.ptr()); ++i) {
    PyObject* other = PyList_GET_ITEM(others_.ptr(), i);
    if (other != root_.ptr()) walk(other, false, notes);
  }
}

void Parameters::walk(PyObject* module, bool is_strict, bool notes) {
  const py::object attributes = dict_of(module);
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (const py::object parameters = entries_of(attributes, names().parameters)) {
    if (notes) note(module, names().parameters, parameters.ptr(), is_strict);
    while (!notes && is_strict && PyDict_Next(parameters.ptr(), &position, &key, &value) != 0) {
      if (counts(value)) sum_ += version_of(value);
    }
  }
  if (!notes) {
    note_mode(attributes);
    note_generators(attributes.ptr());
    if (entries_of(attributes, names().buffers)) append(&buffered_, module);
  }
  position = 0;
  if (const py::object modules = entries_of(attributes, names().modules)) {
    if (notes) note(module, names().modules, modules.ptr(), false);
    while (PyDict_Next(modules.ptr(), &position, &key, &value) != 0) {
      if (value == Py_None) continue;
      const auto child = py::reinterpret_borrow<py::object>(value);
      walk(child.ptr(), is_strict, notes);
    }
  }
}

void Parameters::note_mode(const py::object& attributes) {
  py::object mode = item_of(attributes.ptr(), names().training);
  if (mode) modes_.push_back({attributes, std::move(mode)});
}

void Parameters::add_generator(PyObject* value) {
  if (!is_generator(value)) return;
  for (Py_ssize_t i = 0; generators_ && i < PyList_GET_SIZE(generators_.ptr()); ++i) {
    if (PyList_GET_ITEM(generators_.ptr(), i) == value) return;
  }
  append(&generators_, value);
}

void Parameters::note_generators(PyObject* attributes) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(attributes, &position, &key, &value) != 0) {
    if (is_of_every_module(key)) continue;
    if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
      const Py_ssize_t size = std::min(PySequence_Fast_GET_SIZE(value), kMostLookedAt);
      for (Py_ssize_t i = 0; i < size; ++i) add_generator(PySequence_Fast_GET_ITEM(value, i));
    } else if (PyDict_CheckExact(value)) {
      PyObject *inner_key, *item;
      Py_ssize_t place = 0;
      for (Py_ssize_t i = 0; i < kMostLookedAt && PyDict_Next(value, &place, &inner_key, &item) != 0; ++i) {
        add_generator(item);
      }
    } else {
      add_generator(value);
    }
  }
}

bool Parameters::is_mode_switched() const {
  return std::any_of(modes_.begin(), modes_.end(), [](const Mode& mode) {
    return item_of(mode.attributes.ptr(), names().training).ptr() != mode.value.ptr();
  });
}

void Parameters::note(PyObject* module, PyObject* name, PyObject* dict, bool is_strict) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    Entry entry{py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value), -1, {}, 0};
    if (is_strict && counts(value)) {
      entry.version = 0;
      if (!read_version(value, &entry.version)) entry.copy = call(names().own_copy, value);
      entry.implementation = reads().implementation.number(value);
      sum_ += entry.version;
    }
    entries_.push_back(std::move(entry));
  }
  groups_.push_back({py::reinterpret_borrow<py::object>(module), name, entries_.size()});
}

void Parameters::forward_done() {
  if (!root_ && !others_) return;
  entries_.reserve(kFew);
  groups_.reserve(kFew);
  walk_roots(true);
  if (sum_ != sum_before_) {
    groups_.clear();
    entries_.clear();
  }
}

// Calls visit(group, entry, dict, current value: null if there is none).
template <typename Visit>
void Parameters::for_each_entry(const Visit& visit) const {
  std::size_t i = 0;
  for (const Group& group : groups_) {
    const py::object dict = entries_of(dict_of(group.module.ptr()), group.name);
    for (; i < group.end; ++i) {
      const py::object found = dict ? item_of(dict.ptr(), entries_[i].key.ptr()) : py::object();
      visit(group, entries_[i], dict.ptr(), found.ptr());
    }
  }
}

bool Parameters::check(bool checks_versions, bool may_be_replaced) const {
  bool is_replaced = false;
  for_each_entry([&](const Group& group, const Entry& entry, PyObject* dict, PyObject* found) {
    if (has_replaced(found, entry.value.ptr())) {
      const bool is_own = item_of(dict_of(group.module.ptr()).ptr(), group.name).ptr() == dict;
      if (!(may_be_replaced && is_own) && entry.version >= 0) raise_changed(found, entry.version, -1);
      is_replaced = true;
    } else if (found != entry.value.ptr()) {
      return;  // sharded meanwhile, for example: the new value is unknown
    }
    if (!checks_versions || entry.version < 0) return;
    PyObject* parameter = entry.value.ptr();
    if (reads().implementation.number(parameter) != entry.implementation) raise_changed(parameter, entry.version, -1);
    const long long version = version_of(parameter);
    if (version == entry.version && (!entry.copy || has_same_bytes(entry.copy, parameter))) return;
    raise_changed(parameter, entry.version, version);
  });
  return is_replaced || is_mode_switched();
}

void Parameters::raise_changed(PyObject* parameter, long long before, long long now) const {
  PyObject* error = PyObject_CallFunction(names().parameter_error, "OOLL", root_.ptr(), parameter, before, now);
  if (error == nullptr) throw py::error_already_set();
  raise(py::reinterpret_steal<py::object>(error));
}

py::object Parameters::replaced() const {
  py::object result;
  for (const Mode& mode : modes_) {
    if (item_of(mode.attributes.ptr(), names().training).is(mode.value)) continue;
    append(&result, py::make_tuple(mode.attributes, py::handle(names().training), mode.value).ptr());
  }
  for_each_entry([&](const Group&, const Entry& entry, PyObject* dict, PyObject* found) {
    if (!has_replaced(found, entry.value.ptr())) return;
    append(&result, py::make_tuple(py::handle(dict), entry.key, entry.value).ptr());
  });
  return result;
}

void Parameters::release() { const Parameters released = std::exchange(*this, Parameters()); }

void add_parameter_functions(py::module_& module) {
  const auto list_of = [](const py::object& list) { return list ? py::list(list) : py::list(); };
  py::class_<Parameters, Handle>(module, "Parameters", "Parameters as a forward left them.",
                                 collected::by_collector<Parameters, Handle>())
      .def(py::init([](const py::object& function, const py::object& others) {
             return Handle(new Parameters(function.ptr(), others.is_none() ? nullptr : others.ptr()));
           }),
           py::arg("function"), py::arg("others") = py::none())
      .def("forward_done", &Parameters::forward_done)
      .def("check", &Parameters::check, py::arg("checks_versions") = true, py::arg("may_be_replaced") = false)
      .def("replaced", [=](const Parameters& self) { return list_of(self.replaced()); })
      .def_property_readonly("buffered", [=](const Parameters& self) { return list_of(self.buffered()); })
      .def_property_readonly("generators", [=](const Parameters& self) { return list_of(self.generators()); });
}

}  // namespace actckpt
