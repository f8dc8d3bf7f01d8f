#include "rerun/containers.h"

#include <structmember.h>  // T_OBJECT_EX; the new name exists from Python 3.12 on

#include "core/python.h"

namespace actckpt {
namespace {

using Kind = Container::Kind;

void done(int result) {
  if (result < 0) throw py::error_already_set();
}

PyObject** slot_at(const py::object& object, const PyMemberDef* slot) {
  return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + slot->offset);
}

py::object slots_dict(const py::object& object) {
  py::dict values;
  for (const PyMemberDef* slot : slots_of(Py_TYPE(object.ptr()))) {
    PyObject* value = *slot_at(object, slot);
    if (value != nullptr) values[py::int_(slot->offset)] = py::reinterpret_borrow<py::object>(value);
  }
  return std::move(values);
}

// The dict itself, for kinds that are dicts.
py::object dict_of(const Container& container) {
  return container.kind == Kind::kAttributes ? owned(PyObject_GenericGetDict(container.object.ptr(), nullptr))
                                             : container.object;
}

PyObject* value_at(const py::object& dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict.ptr(), key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// The entries of a namespace whose names are in `names`.
py::object named(const py::object& variables, const py::object& names) {
  py::dict values;
  PyObject *name, *unused;
  Py_ssize_t position = 0;
  while (PyDict_Next(names.ptr(), &position, &name, &unused) != 0) {
    if (PyObject* value = value_at(variables, name)) done(PyDict_SetItem(values.ptr(), name, value));
  }
  return std::move(values);
}

bool same_lists(PyObject* one, PyObject* other) {
  const Py_ssize_t size = PyList_GET_SIZE(one);
  if (size != PyList_GET_SIZE(other)) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (PyList_GET_ITEM(one, i) != PyList_GET_ITEM(other, i)) return false;
  }
  return true;
}

bool same_dicts(PyObject* one, PyObject* other) {
  if (PyDict_GET_SIZE(one) != PyDict_GET_SIZE(other)) return false;
  PyObject *key, *value, *other_key, *other_value;
  Py_ssize_t position = 0, other_position = 0;
  while (PyDict_Next(one, &position, &key, &value) != 0) {
    if (PyDict_Next(other, &other_position, &other_key, &other_value) == 0) return false;
    if (key != other_key || value != other_value) return false;
  }
  return true;
}

// Calls a method of the built-in type, even if a subclass overrides it.
py::object call_base(PyObject* type, const char* method, const py::object& object) {
  return owned(PyObject_CallMethod(type, method, "O", object.ptr()));
}

void put_dict(const py::object& dict, const py::object& contents) {
  if (same_dicts(dict.ptr(), contents.ptr())) return;
  const py::object released = owned(PyDict_Copy(dict.ptr()));  // freed once the dict is consistent
  PyDict_Clear(dict.ptr());
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(contents.ptr(), &position, &key, &value) != 0) {
    done(PyDict_SetItem(dict.ptr(), key, value));
  }
}

void put_ordered(const py::object& dict, const py::object& contents) {
  call_base(reinterpret_cast<PyObject*>(&PyODict_Type), "clear", dict);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(contents.ptr()); ++i) {
    PyObject* item = PyList_GET_ITEM(contents.ptr(), i);
    done(PyODict_SetItem(dict.ptr(), PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1)));
  }
}

void put_slot(const py::object& object, PyObject* offset, PyObject* value) {
  for (const PyMemberDef* slot : slots_of(Py_TYPE(object.ptr()))) {
    if (slot->offset != PyLong_AsSsize_t(offset)) continue;
    PyObject** place = slot_at(object, slot);
    PyObject* released = *place;
    *place = Py_XNewRef(value);
    Py_XDECREF(released);
  }
}

}  // namespace

bool has_keys(const Container& container) noexcept { return container.kind == Kind::kDict || is_shared(container); }

bool is_shared(const Container& container) noexcept {
  return container.kind == Kind::kAttributes || container.kind == Kind::kSlots || container.kind == Kind::kGlobals;
}

std::vector<PyMemberDef*> slots_of(PyTypeObject* type) {
  std::vector<PyMemberDef*> slots;
  PyObject* bases = type->tp_mro;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bases); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
    if (PyType_HasFeature(base, Py_TPFLAGS_HEAPTYPE) == 0 || base->tp_members == nullptr) continue;
    if (value_at(py::reinterpret_borrow<py::object>(base->tp_dict), names().slots) == nullptr) continue;
    for (PyMemberDef* member = base->tp_members; member->name != nullptr; ++member) {
      if (member->type == T_OBJECT_EX) slots.push_back(member);
    }
  }
  return slots;
}

py::object contents_of(const Container& container) {
  switch (container.kind) {
    case Kind::kList:
      return owned(PyList_GetSlice(container.object.ptr(), 0, PY_SSIZE_T_MAX));
    case Kind::kDict:
    case Kind::kAttributes:
      return owned(PyDict_Copy(dict_of(container).ptr()));
    case Kind::kSlots:
      return slots_dict(container.object);
    case Kind::kGlobals:
      return named(container.object, container.found);
    case Kind::kOrderedDict:
      return owned(
          PySequence_List(call_base(reinterpret_cast<PyObject*>(&PyODict_Type), "items", container.object).ptr()));
    case Kind::kSet:
      return owned(
          PySequence_List(call_base(reinterpret_cast<PyObject*>(&PySet_Type), "__iter__", container.object).ptr()));
    case Kind::kDeque:
      return owned(PySequence_List(call_base(names().deque_type, "__iter__", container.object).ptr()));
  }
  throw std::logic_error("a container of no kind");
}

bool holds(const Container& container, const py::object& contents) {
  switch (container.kind) {
    case Kind::kList:
      return same_lists(container.object.ptr(), contents.ptr());
    case Kind::kDict:
    case Kind::kAttributes:
      return same_dicts(dict_of(container).ptr(), contents.ptr());
    case Kind::kSlots:
      return PySet_GET_SIZE(different_keys(slots_dict(container.object), contents).ptr()) == 0;
    case Kind::kGlobals:
      return same_dicts(named(container.object, contents).ptr(), contents.ptr());
    case Kind::kOrderedDict: {
      const py::object now = contents_of(container);
      const Py_ssize_t size = PyList_GET_SIZE(now.ptr());
      if (size != PyList_GET_SIZE(contents.ptr())) return false;
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* one = PyList_GET_ITEM(now.ptr(), i);
        PyObject* other = PyList_GET_ITEM(contents.ptr(), i);
        for (Py_ssize_t part = 0; part < 2; ++part) {
          if (PyTuple_GET_ITEM(one, part) != PyTuple_GET_ITEM(other, part)) return false;
        }
      }
      return true;
    }
    case Kind::kSet:
    case Kind::kDeque:
      return same_lists(contents_of(container).ptr(), contents.ptr());
  }
  throw std::logic_error("a container of no kind");
}

void put(const Container& container, const py::object& contents) {
  const py::object released = contents_of(container);  // freed once the container is consistent
  switch (container.kind) {
    case Kind::kList:
      return done(PyList_SetSlice(container.object.ptr(), 0, PY_SSIZE_T_MAX, contents.ptr()));
    case Kind::kDict:
      return put_dict(container.object, contents);
    case Kind::kAttributes:
    case Kind::kSlots:
    case Kind::kGlobals:
      return put_keys(container, contents, different_keys(released, contents));
    case Kind::kOrderedDict:
      return put_ordered(container.object, contents);
    case Kind::kSet:
      call_base(reinterpret_cast<PyObject*>(&PySet_Type), "clear", container.object);
      owned(PyObject_CallMethod(reinterpret_cast<PyObject*>(&PySet_Type), "update", "OO", container.object.ptr(),
                                contents.ptr()));
      return;
    case Kind::kDeque:
      call_base(names().deque_type, "clear", container.object);
      owned(PyObject_CallMethod(names().deque_type, "extend", "OO", container.object.ptr(), contents.ptr()));
      return;
  }
}

void put_keys(const Container& container, const py::object& contents, const py::object& keys) {
  const py::object released = contents_of(container);
  for (const py::handle key : keys) {
    PyObject* value = value_at(contents, key.ptr());
    if (container.kind == Kind::kSlots) {
      put_slot(container.object, key.ptr(), value);
      continue;
    }
    const py::object dict = dict_of(container);
    if (value != nullptr) {
      done(PyDict_SetItem(dict.ptr(), key.ptr(), value));
    } else if (value_at(dict, key.ptr()) != nullptr) {
      done(PyDict_DelItem(dict.ptr(), key.ptr()));
    }
  }
}

py::object different_keys(const py::object& one, const py::object& other) {
  py::set keys;
  PyObject *key, *value;
  for (const auto& [dict, against] : {std::pair(one, other), std::pair(other, one)}) {
    Py_ssize_t position = 0;
    while (PyDict_Next(dict.ptr(), &position, &key, &value) != 0) {
      if (value_at(against, key) != value) done(PySet_Add(keys.ptr(), key));
    }
  }
  return std::move(keys);
}

}  // namespace actckpt
