#include "replay/execute.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/grad_mode.h"
#include "core/meter.h"
#include "core/modes.h"
#include "core/python.h"
#include "core/reads.h"
#include "graph/lineage.h"
#include "graph/needs.h"
#include "graph/window.h"
#include "record/callee.h"
#include "record/paused.h"
#include "replay/order.h"
#include "replay/repeated_collectives.h"

namespace actckpt::replay {
namespace {

// Operators replayed since the process started.
long long num_replayed = 0;

long long nbytes_behind(PyObject* tensor) { return reads().nbytes.number(reads().untyped_storage(tensor).ptr()); }

// Disables autograd, recorders and forward-mode AD for its lifetime, whatever the grad mode. In C++, since a signal
// handler that interrupts Python between two lines would leave them disabled in the thread (NOTE [ Replay ], Rule 7).
class BelowAutograd {
 public:
  BelowAutograd() : guard_(call(names().below_autograd)) { call_method(guard_.ptr(), names().enter); }
  BelowAutograd(const BelowAutograd&) = delete;
  BelowAutograd& operator=(const BelowAutograd&) = delete;
  ~BelowAutograd() noexcept {
    py::error_scope pending;
    PyObject* done = PyObject_CallMethodObjArgs(guard_.ptr(), names().exit, Py_None, Py_None, Py_None, nullptr);
    if (done == nullptr) PyErr_WriteUnraisable(guard_.ptr());
    Py_XDECREF(done);
  }

 private:
  Pause pause_;
  py::object guard_;
};

// Whether a step can be called directly, under the current settings.
bool is_plain(const StepObject* step) {
  return is_none(step->random) && call(names().any_autocast_enabled).ptr() == Py_False &&
         PyLong_AsLong(call(names().num_function_modes).ptr()) == 0 && are_numerics(step->numerics);
}

// Tensors on the storages that a step reads and writes.
class Bases {
 public:
  PyObject* find(const PyObject* value) const {
    for (const auto& [known, base] : bases_) {
      if (known == value) return base.ptr();
    }
    return nullptr;
  }
  void set(PyObject* value, py::object base) {
    for (auto& [known, old] : bases_) {
      if (known == value) {
        old = std::move(base);
        return;
      }
    }
    bases_.emplace_back(value, std::move(base));
  }

  // From here on, passes the tensors on the storages themselves where they equal the windows. Only for torch's own
  // operators that do nothing but read them.
  void give_themselves() { gives_themselves_ = true; }

  // A recorded argument with its windows replaced by tensors.
  py::object with_tensors(PyObject* argument) const {
    if (Py_TYPE(argument) == window_type) {
      const auto* window = reinterpret_cast<WindowObject*>(argument);
      PyObject* base = find(window->value);
      return on(base, window, gives_themselves_ && may_be_given(base));
    }
    if (!PyList_CheckExact(argument)) return py::reinterpret_borrow<py::object>(argument);
    py::list items(PyList_GET_SIZE(argument));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(argument); ++i) {
      PyList_SET_ITEM(items.ptr(), i, with_tensors(PyList_GET_ITEM(argument, i)).release().ptr());
    }
    return std::move(items);
  }

  py::tuple args_of(const StepObject* step) const {
    py::tuple args(PyList_GET_SIZE(step->args));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(step->args); ++i) {
      PyTuple_SET_ITEM(args.ptr(), i, with_tensors(PyList_GET_ITEM(step->args, i)).release().ptr());
    }
    return args;
  }

  // Null: none.
  py::object kwargs_of(const StepObject* step) const {
    if (is_none(step->kwargs) || PyDict_GET_SIZE(step->kwargs) == 0) return py::object();
    py::dict kwargs;
    PyObject *name, *argument;
    Py_ssize_t position = 0;
    while (PyDict_Next(step->kwargs, &position, &name, &argument) != 0) kwargs[name] = with_tensors(argument);
    return std::move(kwargs);
  }

 private:
  // Replayed operators must not get a tensor that requires grad.
  static bool may_be_given(PyObject* base) {
    return reinterpret_cast<PyObject*>(Py_TYPE(base)) == names().tensor_type && !reads().requires_grad.is_true(base);
  }

  std::vector<std::pair<PyObject*, py::object>> bases_;
  bool gives_themselves_ = false;
};

// The results of an operator, in the order of their numbers in forward.
void flatten(PyObject* result, std::vector<PyObject*>* flat) {
  if (PyList_Check(result) || PyTuple_Check(result)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); ++i) {
      flatten(PySequence_Fast_GET_ITEM(result, i), flat);
    }
  } else {
    flat->push_back(result);
  }
}

// One replay: executes steps in order, and holds the results that are still needed.
class Run {
 public:
  Run(TapeObject* tape, ValueObject* target, long long task, Plan plan)
      : tape_(tape), target_(target), task_(task), steps_(std::move(plan.steps)) {
    for (const py::object& step : steps_) add_outputs(as_step(step));
    for (const py::object& step : steps_) {
      for (PyObject* input : inputs_of(as_step(step))) {
        if (Made* made = find(input)) made->num_uses += 1;
      }
    }
    for (const py::object& value : plan.retained) {
      if (Made* made = find(value.ptr())) made->is_retained = true;
    }
  }

  py::object result() {
    for (const py::object& step : steps_) execute(as_step(step));
    return find(as_object(target_))->tensor;
  }

 private:
  // A value that one of the steps makes.
  struct Made {
    py::object value;
    py::object tensor;  // null: not made yet, or not needed any more
    int num_uses = 0;   // by steps that have not run yet
    bool is_retained = false;
  };

  // Without repeats.
  static std::vector<PyObject*> inputs_of(const StepObject* step) {
    std::vector<PyObject*> inputs;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(step->inputs); ++i) {
      PyObject* input = PyList_GET_ITEM(step->inputs, i);
      if (std::find(inputs.begin(), inputs.end(), input) == inputs.end()) inputs.push_back(input);
    }
    return inputs;
  }

  Made* find(PyObject* value) {
    const auto at = made_.find(value);
    return at == made_.end() ? nullptr : &at->second;
  }

  void add_outputs(const StepObject* step) {
    for (Py_ssize_t i = 0; step->outputs != nullptr && i < PyList_GET_SIZE(step->outputs); ++i) {
      PyObject* value = referent(PyList_GET_ITEM(step->outputs, i));
      if (value != nullptr) made_[value].value = py::reinterpret_borrow<py::object>(value);
    }
  }

  void execute(StepObject* step) {
    const std::vector<PyObject*> inputs = inputs_of(step);
    Bases bases;
    for (PyObject* input : inputs) bases.set(input, base_of(input));
    if (!below_) below_.emplace();
    for (Py_ssize_t i = 0; step->written != nullptr && i < PyList_GET_SIZE(step->written); ++i) {
      PyObject* value = PyList_GET_ITEM(step->written, i);
      bases.set(value, private_copy(value, bases.find(value)));
    }
    check_is_in_turn(tape_, step);
    if (is_true(step->operator_, names().is_plain)) bases.give_themselves();
    const py::object result = called(step, bases);
    num_replayed += 1;
    keep_results(step, result, bases);
    for (PyObject* input : inputs) {
      Made* made = find(input);
      if (made == nullptr) continue;
      made->num_uses -= 1;
      if (made->num_uses == 0 && input != as_object(target_)) made->tensor = py::object();
    }
  }

  py::object base_of(PyObject* input) {
    const Made* made = find(input);
    if (made != nullptr && made->tensor) return made->tensor;
    auto* value = reinterpret_cast<ValueObject*>(input);
    if (is_none(value->held)) below_.reset();  // loading it may run user code
    return bytes_of(tape_, value, nullptr, 0, nullptr);
  }

  // Memory with the bytes of a value that a step may write to (NOTE [ Replay ], Rule 1).
  py::object private_copy(PyObject* value, PyObject* base) {
    Made* made = find(value);
    const bool is_alone = made != nullptr && made->tensor && !made->is_retained && value != as_object(target_);
    if (is_alone && made->num_uses == 1) return std::exchange(made->tensor, py::object());
    return call_with(names().private_memory, value, base == nullptr ? Py_None : base);
  }

  // Calls a step's operator in the grad mode of its forward; no argument requires grad.
  py::object called(StepObject* step, const Bases& bases) {
    const py::tuple args = bases.args_of(step);
    const py::object kwargs = bases.kwargs_of(step);
    const GradMode grad(step->grad_enabled != 0);
    if (!is_plain(step)) {
      return call_with(names().replay_specially, reinterpret_cast<PyObject*>(step), args.ptr(),
                       kwargs ? kwargs.ptr() : Py_None);
    }
    return callee_of(step->operator_)(args.ptr(), kwargs.ptr());
  }

  void keep_results(const StepObject* step, const py::object& result, const Bases& bases) {
    std::vector<PyObject*> flat;
    flatten(result.ptr(), &flat);
    for (Py_ssize_t i = 0; step->outputs != nullptr && i < PyList_GET_SIZE(step->outputs); ++i) {
      PyObject* value = referent(PyList_GET_ITEM(step->outputs, i));
      Made* made = value == nullptr ? nullptr : find(value);
      if (made == nullptr) continue;
      const auto [kind, index] = (*step->results)[i];
      const bool is_missing = kind == 0 && static_cast<std::size_t>(index) >= flat.size();
      keep(made, is_missing ? Py_None : kind != 0 ? bases.find(PyList_GET_ITEM(step->written, index)) : flat[index]);
    }
  }

  void keep(Made* made, PyObject* tensor) {
    auto* value = reinterpret_cast<ValueObject*>(made->value.ptr());
    if (!is_of_type(tensor, names().tensor_type) || nbytes_behind(tensor) != value->nbytes) {
      raise(call_with(names().other_bytes_error, made->value.ptr(), tensor));
    }
    if (!is_none(tape_->meter)) note_alive(tape_->meter, reads().untyped_storage(tensor).ptr());
    if (!is_none(value->entry)) reinterpret_cast<EntryObject*>(value->entry)->num_replays += 1;
    if (value == target_ || made->num_uses > 0) made->tensor = py::reinterpret_borrow<py::object>(tensor);
    if ((made->is_retained || value->is_repeated != 0) && task_ != -1 && !is_available(value)) {
      cache(reinterpret_cast<PyObject*>(tape_), value, tensor, task_);
    }
  }

  TapeObject* tape_;
  ValueObject* target_;
  long long task_;
  std::vector<py::object> steps_;
  std::unordered_map<PyObject*, Made> made_;
  std::optional<BelowAutograd> below_;
};

// A tensor on the storage of `target`, made by executing the steps that it depends on.
py::object replay(TapeObject* tape, ValueObject* target, long long clock) {
  if (is_none(target->step)) raise(call_with(names().lost_error, as_object(target)));
  const long long task = current_task();
  count_needs(tape, task);
  return Run(tape, target, task, plan_of(tape, target, task, clock)).result();
}

// The bytes that a region holds; throws if they changed after the region closed, or were freed.
py::object held_bytes(const TapeObject* tape, ValueObject* value) {
  py::object held = py::reinterpret_borrow<py::object>(value->held);
  if (tape->is_open == 0 && version_of(held.ptr()) != value->version) {
    raise(call_with(names().changed_after_error, held.ptr(), number(value->version).ptr()));
  }
  const long long found = nbytes_behind(held.ptr());
  if (found != value->nbytes) raise(call_with(names().resized_error, held.ptr(), as_object(value)));
  return held;
}

// Whether other tensors count changes of stored bytes.
bool is_watched_by_others(PyObject* stored) {
  return !is_none(stored) && reinterpret_cast<PyObject*>(Py_TYPE(stored)) == names().watched_type;
}

// An entry loaded beyond the limit is evicted at the next load. Not at once: several saved tensors of one operator,
// such as query, key and value of attention, share a storage and are unpacked one after the other.
void dismiss_over_budget_entry(TapeObject* tape, const ValueObject* value) {
  if (tape->cached == nullptr || tape->cached->over_budget_entry == nullptr ||
      tape->cached->over_budget_entry == value || has_room(tape))
    return;
  const auto over_budget_entry = py::reinterpret_borrow<py::object>(as_object(tape->cached->over_budget_entry));
  evict(as_value(over_budget_entry), as_value(over_budget_entry)->cached_task);
}

py::object stored_bytes(TapeObject* tape, ValueObject* value, PyObject* window) {
  dismiss_over_budget_entry(tape, value);
  const py::object stored = py::reinterpret_borrow<py::object>(value->stored);
  py::object tensor = call_with(names().read_stored, stored.ptr(), window == nullptr ? Py_None : window);
  if (is_watched_by_others(stored.ptr()) && !is_true(stored.ptr(), names().is_away)) return tensor;  // it is held
  const long long task = current_task();
  count_needs(tape, task);
  if (is_none(tape->outer) && task != -1 && is_asked(value, task)) {
    const bool is_over_budget = !has_room(tape);
    cache(reinterpret_cast<PyObject*>(tape), value, tensor.ptr(), task);  // so that it is loaded once
    if (is_over_budget && !is_none(value->cached)) value->cached_in->over_budget_entry = value;
  }
  return tensor;
}

}  // namespace

bool has_room(const TapeObject* tape) {
  return tape->window_bytes < 0 || tape->cached == nullptr || tape->cached->bytes <= tape->window_bytes;
}

long long current_task() { return PyLong_AsLongLong(call(names().graph_task_id).ptr()); }

py::object bytes_of(TapeObject* tape, ValueObject* value, PyObject* window, long long clock, bool* is_fresh) {
  if (!is_none(value->held)) return held_bytes(tape, value);
  if (!is_none(value->cached)) {  // hold it during the check: another backward may release it
    py::object cached = py::reinterpret_borrow<py::object>(value->cached);
    if (version_of(cached.ptr()) == value->cached_version) {
      if (is_watched_by_others(value->stored)) {
        const py::object stored = py::reinterpret_borrow<py::object>(value->stored);
        call_with(names().check_watched, stored.ptr(), window == nullptr ? Py_None : window);
      }
      return cached;
    }
    if (is_none(value->step) || value->is_repeated != 0) {
      raise(call_with(names().changed_after_error, cached.ptr(), number(value->cached_version).ptr()));
    }
    uncache(value);  // backward changed a tensor that it had unpacked
  }
  if (!is_none(value->stored)) return stored_bytes(tape, value, window);
  py::object made = replay(tape, value, clock);
  if (is_fresh != nullptr) *is_fresh = is_none(value->cached);
  return made;
}

void add_execute_functions(py::module_& module) {
  module.def("bytes_of", [](const py::handle& tape, const py::handle& value) {
    return bytes_of(as_tape(tape), as_value(value), nullptr, 0, nullptr);
  });
  module.def("has_room", [](const py::handle& tape) { return has_room(as_tape(tape)); });
  module.def("num_replayed", [] { return num_replayed; });
}

}  // namespace actckpt::replay
