#include "rerun/task_end.h"

#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/python.h"

namespace actckpt {
namespace {

struct TaskEndObject {
  PyObject_HEAD long long task_id;
  std::vector<py::object> frames;  // weak references
};

PyTypeObject* task_end_type = nullptr;

// Graph tasks under way, by id. Borrowed: a TaskEnd removes itself.
std::unordered_map<long long, TaskEndObject*>& open_tasks() {
  static auto* tasks = new std::unordered_map<long long, TaskEndObject*>();
  return *tasks;
}

void drop_values(TaskEndObject* task) noexcept {
  const std::vector<py::object> frames = std::move(task->frames);
  task->frames.clear();
  if (frames.empty()) return;
  PyObject* id = PyLong_FromLongLong(task->task_id);
  for (const py::object& reference : frames) {
    const py::object frame = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(reference.ptr()));
    if (frame && !frame.is_none()) reinterpret_cast<FrameObject*>(frame.ptr())->drop(id);
  }
  Py_XDECREF(id);
}

PyObject* task_end_call(PyObject* self, PyObject*, PyObject*) {
  drop_values(reinterpret_cast<TaskEndObject*>(self));
  Py_RETURN_NONE;
}

void task_end_dealloc(PyObject* self) {
  auto* task = reinterpret_cast<TaskEndObject*>(self);
  // A pending exception must survive: this runs while the engine unwinds from a failed backward.
  py::error_scope pending;
  open_tasks().erase(task->task_id);
  drop_values(task);
  using Frames = std::vector<py::object>;
  task->frames.~Frames();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(task_end_call)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(task_end_dealloc)},
                       {0, nullptr}};
PyType_Spec spec = {"actckpt._C.TaskEnd", sizeof(TaskEndObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

py::object new_task_end(long long task_id) {
  TaskEndObject* task = PyObject_New(TaskEndObject, task_end_type);
  if (task == nullptr) throw py::error_already_set();
  task->task_id = task_id;
  new (&task->frames) std::vector<py::object>();
  open_tasks()[task_id] = task;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(task));
}

}  // namespace

void drop_at_task_end(FrameObject* frame, PyObject* task_id) {
  const long long id = PyLong_AsLongLong(task_id);
  auto found = open_tasks().find(id);
  if (found == open_tasks().end()) {
    const py::object task = new_task_end(id);
    PyObject* done = PyObject_CallOneArg(names().queue_callback, task.ptr());
    if (done == nullptr) throw py::error_already_set();
    Py_DECREF(done);
    found = open_tasks().find(id);
    if (found == open_tasks().end()) throw std::runtime_error("autograd dropped a queued callback");
  }
  PyObject* reference = PyWeakref_NewRef(reinterpret_cast<PyObject*>(frame), nullptr);
  if (reference == nullptr) throw py::error_already_set();
  found->second->frames.push_back(py::reinterpret_steal<py::object>(reference));
}

void add_task_end_type() {
  task_end_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (task_end_type == nullptr) throw py::error_already_set();
}

}  // namespace actckpt
