#include "core/task_end.h"

#include <new>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace actckpt {
namespace {

struct TaskEndObject {
  PyObject_HEAD long long task;
  bool is_done;
  std::vector<AtTaskEnd> functions;
};

PyTypeObject* task_end_type = nullptr;

// Running graph tasks, by id. Borrowed: a TaskEnd removes itself.
std::unordered_map<long long, TaskEndObject*>& open_tasks() {
  static auto* tasks = new std::unordered_map<long long, TaskEndObject*>();
  return *tasks;
}

// Calls all functions; returns the first Python error.
std::optional<py::error_already_set> tell_all(TaskEndObject* task) {
  std::optional<py::error_already_set> first;
  const std::vector<AtTaskEnd> functions = std::exchange(task->functions, {});
  const TaskResult result = task->is_done ? TaskResult::kDone : TaskResult::kFailed;
  for (const AtTaskEnd& function : functions) {
    try {
      function(result);
    } catch (py::error_already_set& error) {
      if (!first) first.emplace(error);
    }
  }
  return first;
}

PyObject* task_end_call(PyObject* self, PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    auto* task = reinterpret_cast<TaskEndObject*>(self);
    task->is_done = true;
    if (auto error = tell_all(task)) throw py::error_already_set(*error);
    Py_RETURN_NONE;
  });
}

void task_end_dealloc(PyObject* self) {
  auto* task = reinterpret_cast<TaskEndObject*>(self);
  open_tasks().erase(task->task);
  {
    // A pending exception must survive: this runs while the engine unwinds from a failed backward.
    py::error_scope pending;
    if (auto error = tell_all(task)) error->discard_as_unraisable("the end of a backward");
  }
  using Functions = std::vector<AtTaskEnd>;
  task->functions.~Functions();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyType_Slot task_end_slots[] = {{Py_tp_call, reinterpret_cast<void*>(task_end_call)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(task_end_dealloc)},
                                {0, nullptr}};
PyType_Spec task_end_spec = {"actckpt._C.TaskEnd", sizeof(TaskEndObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, task_end_slots};

// The TaskEnd of `task`, queued at the first request.
TaskEndObject* task_end_of(long long task) {
  const auto found = open_tasks().find(task);
  if (found != open_tasks().end()) return found->second;
  TaskEndObject* made = PyObject_New(TaskEndObject, task_end_type);
  if (made == nullptr) throw_pending();
  made->task = task;
  made->is_done = false;
  new (&made->functions) std::vector<AtTaskEnd>();
  open_tasks()[task] = made;
  const auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
  call(names().queue_callback, owner.ptr());
  return made;  // the engine holds it
}

// when_backward_ends(function)
PyObject* when_backward_ends(PyObject*, PyObject* function) {
  return guarded([&]() -> PyObject* {
    const long long task = PyLong_AsLongLong(call(names().graph_task_id).ptr());
    at_task_end(task, [held = py::reinterpret_borrow<py::object>(function)](TaskResult) { call(held.ptr()); });
    Py_RETURN_NONE;
  });
}

PyMethodDef task_end_functions[] = {
    {"when_backward_ends", when_backward_ends, METH_O,
     "when_backward_ends(function): call it when the backward under way ends, also if it fails."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void at_task_end(long long task, AtTaskEnd function) { task_end_of(task)->functions.push_back(std::move(function)); }

void add_task_end(py::module_& module) {
  task_end_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&task_end_spec));
  if (task_end_type == nullptr) throw_pending();
  if (PyModule_AddFunctions(module.ptr(), task_end_functions) < 0) throw_pending();
}

}  // namespace actckpt
