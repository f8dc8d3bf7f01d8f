#include "rerun/object_state.h"

#include <deque>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/collected.h"
#include "core/python.h"
#include "rerun/containers.h"
#include "rerun/held.h"

namespace actckpt {
namespace {

using Kind = Container::Kind;

// Maximum number of entries recorded in objects and their containers: an object may lead to a whole program.
constexpr Py_ssize_t kMaxEntriesOfObjects = 10000;

// The top-level package of a module name, as text.
py::object package_of(PyObject* module) {
  if (module == nullptr || PyUnicode_Check(module) == 0) return py::str("");
  const Py_ssize_t end = PyUnicode_FindChar(module, '.', 0, PyUnicode_GET_LENGTH(module), 1);
  if (end < 0) return py::reinterpret_borrow<py::object>(module);
  return py::reinterpret_steal<py::object>(PyUnicode_Substring(module, 0, end));
}

bool is_torch(PyObject* module) { return PyUnicode_CompareWithASCIIString(package_of(module).ptr(), "torch") == 0; }

bool is_standard(PyObject* module) {
  const int result = PySet_Contains(names().left_alone, package_of(module).ptr());
  if (result < 0) throw py::error_already_set();
  return result != 0;
}

// Whether state of classes defined in this module is private to them (NOTE [ Object state ], Rule 4).
bool is_left_alone(PyObject* module) { return is_standard(module) || is_torch(module); }

py::object module_of(PyTypeObject* type) { return attribute(reinterpret_cast<PyObject*>(type), names().module); }

bool is_of_torch(PyTypeObject* type) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
    if (PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE) == 0) continue;
    if (is_torch(module_of(base).ptr())) return true;
  }
  return false;
}

bool has_lock(const py::object& contents) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(contents.ptr(), &position, &key, &value) != 0) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names().lock_types); ++i) {
      if (is_of_type(value, PyTuple_GET_ITEM(names().lock_types, i))) return true;
    }
  }
  return false;
}

}  // namespace

// One walk over everything reachable, breadth first.
class Walk {
 public:
  Walk(Structure& structure, const py::set& rebuilt, const py::list& left_alone)
      : structure_(structure), rebuilt_(rebuilt) {
    for (const py::handle object : left_alone) seen_.insert(object.ptr());
  }

  void run(const py::tuple& roots) {
    add_items(roots.ptr(), false);
    while (!queue_.empty()) {
      const auto [object, is_in_object] = queue_.front();
      queue_.pop_front();
      visit(object, is_in_object);
    }
  }

 private:
  void add(PyObject* object, bool is_in_object) {
    if (object == nullptr || object == Py_None || PyLong_Check(object) || PyUnicode_Check(object) ||
        PyFloat_Check(object) || PyType_Check(object)) {
      return;
    }
    if (is_in_object && entries_left_-- <= 0) return;
    if (seen_.insert(object).second) queue_.emplace_back(object, is_in_object);
  }

  void add_items(PyObject* tuple, bool is_in_object) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      add(PyTuple_GET_ITEM(tuple, i), is_in_object);
    }
  }

  void visit(PyObject* object, bool in) {
    if (is_of_type(object, names().tensor_type)) {
      if (in) structure_.tensors_.append(py::handle(object));
    } else if (is_of_type(object, names().generator_type)) {
      if (in) structure_.generators_.append(py::handle(object));
    } else if (is_of_type(object, names().module_type)) {
      structure_.modules_.append(py::handle(object));
    } else if (PyTuple_Check(object)) {
      add_items(object, in);
    } else if (PyFunction_Check(object)) {
      visit_function(object, in);
    } else if (PyMethod_Check(object)) {
      add(PyMethod_GET_SELF(object), in);
      if (!is_of_type(PyMethod_GET_SELF(object), names().module_type)) {
        add(PyMethod_GET_FUNCTION(object), in);
      }
    } else if (PyCFunction_Check(object)) {
      add(PyCFunction_GET_SELF(object), in);
    } else if (is_of_type(object, names().partial_type)) {
      for (PyObject* name : {names().func, names().args, names().keywords}) {
        add_kept(attribute(object, name), in);
      }
    } else if (PyFrozenSet_Check(object)) {
      add_list(py::reinterpret_steal<py::object>(PySequence_List(object)), in);
    } else if (PyWeakref_CheckRefExact(object)) {
      const py::object referent = call(object);
      if (is_of_type(referent.ptr(), names().module_type)) add_kept(referent, in);
    } else {
      visit_container(object, in);
      visit_object(object);
    }
  }

  void visit_function(PyObject* function, bool in) {
    if (PyObject* closure = PyFunction_GET_CLOSURE(function)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i) {
        add_replaceable(PyCell_GET(PyTuple_GET_ITEM(closure, i)), in);
      }
    }
    add_replaceable(PyFunction_GET_DEFAULTS(function), in);
    add_replaceable(PyFunction_GET_KW_DEFAULTS(function), in);
    note(Kind::kAttributes, function, in);
    if (!is_left_alone(PyFunction_GET_MODULE(function))) note_globals(function, in);
  }

  // The global variables named by a function and the functions that it calls, within one file.
  void note_globals(PyObject* function, bool in) {
    const auto variables = py::reinterpret_borrow<py::dict>(PyFunction_GET_GLOBALS(function));
    py::dict found;
    for (const py::handle name : call(names().global_names, PyFunction_GET_CODE(function))) {
      if (!variables.contains(name)) continue;
      const py::object value = variables[name];
      if (PyModule_Check(value.ptr())) continue;
      found[name] = value;
      const bool is_elsewhere = PyFunction_Check(value.ptr()) && PyFunction_GET_GLOBALS(value.ptr()) != variables.ptr();
      if (!is_elsewhere) add(value.ptr(), in);
    }
    if (found.empty()) return;
    structure_.containers_.push_back({Kind::kGlobals, variables, found, false, {}});
  }

  void visit_container(PyObject* object, bool in) {
    if (PyList_Check(object)) {
      note(Kind::kList, object, in);
    } else if (PyODict_Check(object)) {
      note(Kind::kOrderedDict, object, in);
    } else if (PyDict_Check(object)) {
      note(Kind::kDict, object, in);
    } else if (PySet_Check(object)) {
      note(Kind::kSet, object, in);
    } else if (is_of_type(object, names().deque_type)) {
      note(Kind::kDeque, object, in);
    }
  }

  void visit_object(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (entries_left_ <= 0 || !is_noted(type)) return;
    const bool in = !is_rebuilt(object);
    if (type->tp_dictoffset != 0) note(Kind::kAttributes, object, in);
    if (!slots_of(type).empty()) note(Kind::kSlots, object, in);
  }

  // Whether attributes of such objects are recorded (Rule 4).
  bool is_noted(PyTypeObject* type) {
    const auto known = types_.find(type);
    if (known != types_.end()) return known->second;
    bool result = reinterpret_cast<PyObject*>(type) == names().namespace_type;
    if (!result && PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) != 0) {
      result = !is_standard(module_of(type).ptr()) && !is_of_torch(type);
    }
    types_.emplace(type, result);
    return result;
  }

  void note(Kind kind, PyObject* object, bool in) {
    Container container{kind, py::reinterpret_borrow<py::object>(object), {}, false, {}};
    container.found = contents_of(container);
    if (kind == Kind::kAttributes && has_lock(container.found)) return;
    if (PyDict_Check(container.found.ptr())) {
      PyObject *key, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(container.found.ptr(), &position, &key, &value) != 0) add(value, in);
    } else {
      add_list(container.found, in);
    }
    if (is_rebuilt(object)) {
      kept_.push_back(std::move(container.found));
    } else {
      structure_.containers_.push_back(std::move(container));
    }
  }

  bool is_rebuilt(PyObject* object) const {
    if (PySet_GET_SIZE(rebuilt_.ptr()) == 0) return false;
    return rebuilt_.contains(py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(object)));
  }

  void add_list(const py::object& list, bool in) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) add(PyList_GET_ITEM(list.ptr(), i), in);
    kept_.push_back(list);
  }

  // For objects that code running meanwhile may replace.
  void add_replaceable(PyObject* object, bool in) {
    if (object != nullptr) add_kept(py::reinterpret_borrow<py::object>(object), in);
  }

  void add_kept(py::object object, bool in) {
    add(object.ptr(), in);
    kept_.push_back(std::move(object));
  }

  Structure& structure_;
  const py::set& rebuilt_;
  std::deque<std::pair<PyObject*, bool>> queue_;  // whether it was found in an object
  std::unordered_set<PyObject*> seen_;
  std::unordered_map<PyTypeObject*, bool> types_;
  std::vector<py::object> kept_;  // objects made by the walk, alive until it ends so that ids stay unique
  Py_ssize_t entries_left_ = kMaxEntriesOfObjects;
};

Structure::Structure(const py::tuple& roots, const py::set& rebuilt, const py::list& left_alone) {
  for (const py::handle root : roots) roots_.insert(root.ptr());
  Walk(*this, rebuilt, left_alone).run(roots);
}

py::dict Structure::forward_done() {
  py::dict kept;
  for (Container& container : containers_) {
    container.is_changed = !holds(container, container.found);
    if (!container.is_changed) continue;
    const py::object now = contents_of(container);
    if (has_keys(container)) container.changed_keys = different_keys(container.found, now);
    let_go(container, now, kept);
  }
  return kept;
}

// The previous region may have made a tensor that the forward displaced: its graph would own that region, which owns
// the one before, and so on. A tensor that is an argument too is held anyway.
void Structure::let_go(Container& container, const py::object& now, py::dict& kept) const {
  const auto held = [&](const py::handle value) {
    const auto object = py::reinterpret_borrow<py::object>(value);
    if (roots_.count(value.ptr()) != 0) return object;
    py::object without = without_graph(object);
    if (!without.is(object)) kept[py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(value.ptr()))] = without;
    return without;
  };
  if (container.changed_keys) {
    py::dict found = py::reinterpret_borrow<py::dict>(container.found);
    for (const py::handle key : container.changed_keys) {
      if (found.contains(key)) found[key] = held(found[key]);
    }
    return;
  }
  const bool has_pairs = container.kind == Kind::kOrderedDict;
  const auto value_of = [=](PyObject* item) { return has_pairs ? PyTuple_GET_ITEM(item, 1) : item; };
  std::unordered_set<PyObject*> standing;
  for (const py::handle item : now) standing.insert(value_of(item.ptr()));
  py::list found = py::reinterpret_borrow<py::list>(container.found);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const py::object item = found[i];
    if (standing.count(value_of(item.ptr())) != 0) continue;
    py::object without = held(value_of(item.ptr()));
    found[i] = has_pairs ? py::make_tuple(py::handle(PyTuple_GET_ITEM(item.ptr(), 0)), without) : without;
  }
}

Replaced Structure::swap_in() const {
  Replaced replaced;
  for (std::size_t i = 0; i < containers_.size(); ++i) {
    const Container& container = containers_[i];
    const bool is_as_found = holds(container, container.found);
    if (is_as_found && !container.is_changed) continue;
    replaced.contents.emplace_back(i, contents_of(container));
    if (!is_as_found) put(container, container.found);
  }
  return replaced;
}

void Structure::put_back(const Replaced& replaced) const {
  // A rerun that stopped early may also have changed what the forward changed back.
  auto next = replaced.contents.begin();
  for (std::size_t i = 0; i < containers_.size(); ++i) {
    const bool is_replaced = next != replaced.contents.end() && next->first == i;
    const py::object& before = is_replaced ? (next++)->second : containers_[i].found;
    if (!is_shared(containers_[i]) && !holds(containers_[i], before)) put(containers_[i], before);
  }
  for (const auto& [i, contents] : replaced.contents) {
    const Container& container = containers_[i];
    if (!is_shared(container)) continue;
    // Others may have set other keys meanwhile (a signal handler, for example): these stay.
    const py::object keys = different_keys(container.found, contents);
    if (container.changed_keys) keys.attr("update")(container.changed_keys);
    put_keys(container, contents, keys);
  }
}

bool Structure::is_half_done() const {
  for (const Container& container : containers_) {
    if (!is_shared(container) || holds(container, container.found)) continue;
    const py::object keys = different_keys(container.found, contents_of(container));
    if (container.changed_keys) keys.attr("difference_update")(container.changed_keys);
    if (PySet_GET_SIZE(keys.ptr()) > 0) return true;
  }
  return false;
}

py::str Structure::place_of(const py::object& tensor) const {
  for (const Container& container : containers_) {
    if (container.kind != Kind::kAttributes && container.kind != Kind::kDict) continue;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(container.found)) {
      if (value.ptr() != tensor.ptr()) continue;
      const char* words = container.kind == Kind::kDict ? "Item {!r} of a {}" : "Attribute {!r} of a {}";
      return py::str(words).format(key, py::type::of(container.object).attr("__name__"));
    }
  }
  return py::str("A tensor in an object");
}

void Structure::release() {
  roots_.clear();
  const std::vector<Container> released = std::exchange(containers_, {});
  const py::list lists[] = {take_tensors(), take_generators(), std::exchange(modules_, py::list())};
}

void add_structure_type(py::module_& module) {
  py::class_<Replaced>(module, "Replaced", "What containers held when a rerun began.",
                       collected::by_collector<Replaced>());
  py::class_<Structure>(module, "Structure", "Containers and objects as a forward found them.",
                        collected::by_collector<Structure>())
      .def(py::init<py::tuple, py::set, py::list>(), py::arg("roots"), py::arg("rebuilt"), py::arg("left_alone"))
      .def("forward_done", &Structure::forward_done)
      .def("swap_in", &Structure::swap_in)
      .def("put_back", &Structure::put_back, py::arg("replaced"))
      .def("is_half_done", &Structure::is_half_done)
      .def("place_of", &Structure::place_of, py::arg("tensor"))
      .def_property_readonly("is_empty", &Structure::is_empty)
      .def("take_tensors", &Structure::take_tensors)
      .def("take_generators", &Structure::take_generators)
      .def_property_readonly("modules", &Structure::modules);
}

}  // namespace actckpt
