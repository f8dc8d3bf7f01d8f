#include "rerun/region.h"

#include <memory>
#include <optional>
#include <utility>

#include "core/generators.h"
#include "core/grad_mode.h"
#include "core/locked.h"
#include "core/open_reruns.h"
#include "core/python.h"
#include "core/rescue.h"
#include "core/swap_lock.h"
#include "rerun/held.h"
#include "rerun/parameters.h"
#include "rerun/recomputed_values.h"

namespace actckpt {
namespace {

bool truth(PyObject* object) {
  const int result = PyObject_IsTrue(object);
  if (result < 0) throw py::error_already_set();
  return result != 0;
}

// ------------------------------------------------------------------------------------- state

// Global state, as a tuple. The first two getters return whether autocast or function modes are on: then Python adds
// details.
py::object capture_state() {
  PyObject* getters = names().state_getters;
  const Py_ssize_t count = PyTuple_GET_SIZE(getters);
  py::tuple state(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM(state.ptr(), i, call(PyTuple_GET_ITEM(getters, i)).release().ptr());
  }
  const bool has_details = truth(PyTuple_GET_ITEM(state.ptr(), 0)) || truth(PyTuple_GET_ITEM(state.ptr(), 1));
  if (has_details) return call(names().with_details, state.ptr());
  return std::move(state);
}

// Whether the accelerator is in use: the fourth getter returns the current device, None until one was used.
bool has_device(const py::object& state) {
  constexpr Py_ssize_t kDevice = 3;
  return PyTuple_GET_ITEM(state.ptr(), kDevice) != Py_None;
}

// Whether the current stream is being captured.
bool is_capturing(const py::object& state) { return has_device(state) && call(names().is_capturing).ptr() == Py_True; }

// ------------------------------------------------------------------------------------- calls

// Calls function(*args, **kwargs) under pack and unpack. Returns null with a Python error pending if that failed.
PyObject* call_hooked(PyObject* pack, PyObject* unpack, PyObject* function, PyObject* args, PyObject* kwargs) {
  PyObject* hooks[] = {pack, unpack};
  PyObject* pushed = PyObject_Vectorcall(names().push_hooks, hooks, 2, nullptr);
  if (pushed == nullptr) return nullptr;
  Py_DECREF(pushed);
  PyObject* result = PyObject_Call(function, args, kwargs);
  call_quietly(names().pop_hooks);
  return result;
}

PyObject* unpack_function = nullptr;
PyObject* same_function = nullptr;

// Runs the forward of `frame`; null with a Python error pending if it failed.
PyObject* run_forward(const py::object& frame, PyObject* function, PyObject* args, PyObject* kwargs) {
  PyObject* result = call_hooked(pack_of(frame).ptr(), unpack_function, function, args, kwargs);
  if (result == nullptr) return nullptr;
  const auto owner = py::reinterpret_steal<py::object>(result);
  complete_forward(reinterpret_cast<FrameObject*>(frame.ptr()));
  return Py_NewRef(owner.ptr());
}

// Runs function(*args, **kwargs) with grad mode on until all needed values are there.
void run_until_stopped(const py::object& recomputed, PyObject* function, PyObject* args, PyObject* kwargs) {
  const py::object audit = reinterpret_cast<FrameObject*>(recomputed_frame(recomputed))->context.audit;
  if (audit) call_method(audit.ptr(), names().begin_rerun);
  const GradMode on(true);
  num_open_reruns += 1;
  num_reruns += 1;
  PyObject* result = call_hooked(recomputed_pack_of(recomputed).ptr(), same_function, function, args, kwargs);
  num_open_reruns -= 1;
  if (result != nullptr) {
    Py_DECREF(result);
  } else if (is_stop_of(recomputed.ptr())) {
    PyErr_Clear();
  } else {
    throw py::error_already_set();
  }
}

// ------------------------------------------------------------------------------------- rerun

// Runs `function` until stopped, under the random state of the forward, then restores the current one.
void run_with_random_state(const py::object& random, const py::object& recomputed, PyObject* function, PyObject* args,
                           PyObject* kwargs) {
  const py::object outside = generators_now(random);
  const auto put_back = [&] {
    py::error_scope pending;
    restore_generators(outside);
  };
  restore_generators(random);
  try {
    run_until_stopped(recomputed, function, args, kwargs);
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
}

// The arguments of one rerun. Throws an error for the user if a tensor was changed in place.
py::object restore_inputs(PyObject* held) {
  try {
    return restore_arguments(held);
  } catch (py::error_already_set& error) {
    if (!error.matches(names().changed_error)) throw;
    raise(call_with(names().input_error, error.value().ptr(), held));
  }
}

// Whether the function's modules are as the forward left them. Throws if they cannot be restored.
bool is_as_left(const FrameObject* frame) {
  if (frame->context.parameters->check(frame->check_metadata, true)) return false;
  return !frame->context.buffers || call_method(frame->context.buffers.ptr(), names().are_as_found).ptr() == Py_True;
}

// Whether global state is that of the forward. Inference mode saves nothing, so it was off then.
bool is_same_state(const FrameObject* frame) {
  const py::object state = capture_state();
  const int same = PyObject_RichCompareBool(state.ptr(), frame->context.state.ptr(), Py_EQ);
  if (same < 0) throw py::error_already_set();
  return same != 0 && call(names().is_inference_mode_enabled).ptr() != Py_True;
}

// Calls the function of a region again: from Python, if anything must be put back around the call but random state.
void call_again(const py::object& recomputed) {
  const auto* frame = reinterpret_cast<FrameObject*>(recomputed_frame(recomputed));
  const RecomputeContext& context = frame->context;
  bool is_plain = is_as_left(frame);
  is_plain = is_same_state(frame) && is_plain;
  py::object function = context.function, args, kwargs;
  if (context.region) {
    const py::object restored = call_method(context.region.ptr(), names().restore);
    function = attribute(restored.ptr(), names().function);
    args = attribute(restored.ptr(), names().args);
    kwargs = attribute(restored.ptr(), names().kwargs);
    is_plain = is_plain && attribute(restored.ptr(), names().is_plain).ptr() == Py_True;
    set_restored(recomputed, restored);
  } else {
    args = restore_inputs(context.args.ptr());
  }
  if (!is_plain) {
    call_with(names().rerun_in_python, recomputed.ptr(), function.ptr(), args.ptr(), kwargs ? kwargs.ptr() : Py_None);
  } else if (context.random) {
    run_with_random_state(context.random, recomputed, function.ptr(), args.ptr(), kwargs.ptr());
  } else {
    run_until_stopped(recomputed, function.ptr(), args.ptr(), kwargs.ptr());
  }
}

// Objects made by the rerun may outlive it, and so may its pack hook, which must not own the frame then.
class ClosedAtEnd {
 public:
  explicit ClosedAtEnd(const py::object& recomputed) : recomputed_(recomputed) {}
  ClosedAtEnd(const ClosedAtEnd&) = delete;
  ClosedAtEnd& operator=(const ClosedAtEnd&) = delete;
  ~ClosedAtEnd() noexcept {
    py::error_scope pending;
    close_recomputed(recomputed_);
  }

 private:
  const py::object& recomputed_;
};

void rerun(FrameObject* frame, std::size_t index, const py::object& key) {
  const py::object recomputed = new_recomputed(frame, index, key);
  const ClosedAtEnd closed(recomputed);
  try {
    call_again(recomputed);
  } catch (py::error_already_set&) {
    // the pack hook's finding explains more than its consequences
    if (recomputed_found_mismatch(recomputed)) raise(call(names().failure, recomputed.ptr()));
    throw;
  }
  if (recomputed_has_failed(recomputed)) raise(call(names().failure, recomputed.ptr()));
  store_recomputed(recomputed);
}

// NOTE [ Rerun ], Rules 2 and 4. `key` null: unpacked outside of any backward, so nothing is kept for later.
py::object bring_back(FrameObject* frame, std::size_t index, py::object key) {
  std::optional<Swap> swap;  // before the region's lock: NOTE [ Random state ], Rule 3
  if (frame->context.outer_swap >= 0) swap.emplace(frame->context.outer_swap);
  const Locked locked(frame->context.lock.ptr());
  const bool keep = static_cast<bool>(key);
  if (!keep) key = py::reinterpret_steal<py::object>(PyList_New(0));  // equal to no other key
  py::object value = take(frame, index, key.ptr());
  while (!value) {
    with_rescue(call(names().num_operations), [&] { rerun(frame, index, key); });
    value = take(frame, index, key.ptr());
    if (!was_released(frame, key.ptr())) break;  // by another thread meanwhile
  }
  if (!keep) frame->drop(key.ptr());
  if (value) return value;
  raise(call(names().failure, reinterpret_cast<PyObject*>(frame)));
}

// The key of the values that the current unpack may use: the active GraphExecGroup, else the id of the running graph
// task; null outside of both.
py::object current_key() {
  if (names().graph_exec_group != nullptr) {
    py::object group = call(names().graph_exec_group);
    if (!group.is_none()) return group;
  }
  py::object id = call(names().graph_task_id);
  return PyLong_AsLongLong(id.ptr()) == -1 ? py::object() : id;
}

PyObject* unpack(PyObject*, PyObject* handle) {
  return guarded([&]() -> PyObject* {
    if (Py_TYPE(handle) != slot_type) throw py::type_error("unpack: not a slot of a region");
    auto* slot = reinterpret_cast<SlotObject*>(handle);
    FrameObject* frame = slot->frame;
    // Another thread may release the slot while Python runs below.
    const auto owner = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame));
    const std::size_t index = slot->index;
    py::object key = current_key();
    py::object value = key ? take(frame, index, key.ptr()) : py::object();
    if (!value) value = bring_back(frame, index, std::move(key));
    call_audit(frame, names().check, index, handle);
    return value.release().ptr();
  });
}

PyObject* same(PyObject*, PyObject* tensor) { return Py_NewRef(tensor); }

// ----------------------------------------------------------------------------------- forward

RecomputeContext new_context(PyObject* function, PyObject* early_stop, PyObject* audit) {
  RecomputeContext context;
  context.function = py::reinterpret_borrow<py::object>(function);
  context.lock = call(names().lock_type);
  context.early_stop = truth(early_stop);
  context.may_audit = audit != Py_False;
  if (context.may_audit && audit != Py_None) context.audit = py::reinterpret_borrow<py::object>(audit);
  return context;
}

// The generators that the function may draw from.
py::object generators_of(const RecomputeContext& context, PyObject* args, bool on_device) {
  py::object generators;
  if (context.region) {
    generators = attribute(context.region.ptr(), names().generators);
  } else if (on_device || has_device(context.state)) {
    generators = call(names().generators_of, args);
  } else {
    generators = py::reinterpret_borrow<py::object>(names().cpu_generators);
  }
  if (!context.parameters->generators()) return generators;
  const py::object of_modules = owned(PyList_AsTuple(context.parameters->generators().ptr()));
  return owned(PySequence_Concat(generators.ptr(), of_modules.ptr()));
}

// Completes the context; returns what the forward calls.
py::object prepare(RecomputeContext* context, PyObject* forward, PyObject* args, bool preserves_random,
                   bool on_device) {
  py::object function = py::reinterpret_borrow<py::object>(forward), modules;
  if (context->region) modules = attribute(context->region.ptr(), names().reached_modules);
  context->parameters = std::make_shared<Parameters>(context->function.ptr(), modules.ptr());
  if (preserves_random) {
    context->random = capture_generators_of_rerun(generators_of(*context, args, on_device).ptr());
  }
  if (context->parameters->buffered()) {
    context->buffers = call(names().note_buffers, context->parameters->buffered().ptr());
    function = call_method(context->buffers.ptr(), names().watching, function.ptr());
  }
  const bool changes = context->region && attribute(context->region.ptr(), names().is_swapped).ptr() == Py_True;
  const bool swaps_buffers = context->region && context->buffers;
  if (context->random || swaps_buffers || changes) context->outer_swap = current_swap();
  return function;
}

// run(region, function, forward, args, kwargs, early_stop, preserve_rng_state, check_metadata, audit) -> result. The
// region is Python's, which holds the inputs, and gives `forward`, which calls `function`; or None. With None, returns
// NotImplemented, with nothing done, if one is needed.
PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 9) throw py::type_error("run takes nine arguments");
    const bool has_region = args[0] != Py_None, preserves_random = truth(args[6]);
    if (!has_region && !call(names().top_hooks, Py_False).is_none()) return Py_NewRef(Py_NotImplemented);
    RecomputeContext context = new_context(args[1], args[5], args[8]);
    context.state = capture_state();
    bool on_device = false;
    if (has_region) {
      context.region = py::reinterpret_borrow<py::object>(args[0]);
    } else {
      context.args = hold_arguments(args[3], &on_device);
      const bool raises = preserves_random && is_capturing(context.state);  // in Python
      if (!context.args || raises) return Py_NewRef(Py_NotImplemented);
    }
    const py::object function = prepare(&context, args[2], args[3], preserves_random, on_device);
    const std::shared_ptr<Parameters> parameters = context.parameters;
    const py::object region = context.region, buffers = context.buffers;
    const py::object frame = new_frame(std::move(context), truth(args[7]));
    const auto result = owned(run_forward(frame, function.ptr(), args[3], args[4]));
    parameters->forward_done();
    if (region) call_method(region.ptr(), names().forward_done);
    if (buffers) call_method(buffers.ptr(), names().forward_done);
    return Py_NewRef(result.ptr());
  });
}

// rerun(recomputed, function, args, kwargs): for Python.
PyObject* rerun_function(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 4) throw py::type_error("rerun takes four arguments");
    run_until_stopped(py::reinterpret_borrow<py::object>(args[0]), args[1], args[2], args[3]);
    return Py_NewRef(Py_None);
  });
}

// rerun_again(slot): for audits. Reruns the region of a slot; no value is kept.
PyObject* rerun_again(PyObject*, PyObject* handle) {
  return guarded([&]() -> PyObject* {
    const auto* slot = reinterpret_cast<SlotObject*>(handle);
    const auto owner = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(slot->frame));
    bring_back(slot->frame, slot->index, {});
    return Py_NewRef(Py_None);
  });
}

PyObject* capture_state_function(PyObject*, PyObject*) {
  return guarded([&] { return capture_state().release().ptr(); });
}

PyObject* is_rerunning(PyObject*, PyObject*) { return PyBool_FromLong(is_in_rerun() ? 1 : 0); }

// The frame of the region that a slot belongs to; None if it is no slot.
PyObject* frame_of(PyObject*, PyObject* saved) {
  if (Py_TYPE(saved) != slot_type) Py_RETURN_NONE;
  return Py_NewRef(reinterpret_cast<PyObject*>(reinterpret_cast<SlotObject*>(saved)->frame));
}

PyObject* count_reruns(PyObject*, PyObject*) { return PyLong_FromLongLong(num_reruns); }

PyMethodDef unpack_definition = {"unpack", unpack, METH_O,
                                 "Unpack hook: the tensor of a slot, brought back by a rerun."};
PyMethodDef same_definition = {"same", same, METH_O, "Unpack hook of reruns."};

PyMethodDef region_functions[] = {
    {"run", fast(run), METH_FASTCALL,
     "run(region, function, forward, args, kwargs, early_stop, preserve_rng_state, check_metadata, audit) -> result"},
    {"rerun", fast(rerun_function), METH_FASTCALL, "rerun(recomputed, function, args, kwargs)"},
    {"rerun_again", rerun_again, METH_O, "rerun_again(slot): rerun its region; no value is kept."},
    {"capture_state", capture_state_function, METH_NOARGS, "Global state that reruns restore, as a tuple."},
    {"is_rerunning", is_rerunning, METH_NOARGS, "Whether this thread is in a rerun."},
    {"frame_of", frame_of, METH_O, "The frame of a slot; None for all else."},
    {"num_reruns", count_reruns, METH_NOARGS, "Reruns of the process so far."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_region_functions(py::module_& module) {
  unpack_function = PyCFunction_New(&unpack_definition, nullptr);
  same_function = PyCFunction_New(&same_definition, nullptr);
  if (unpack_function == nullptr || same_function == nullptr) throw py::error_already_set();
  if (PyModule_AddFunctions(module.ptr(), region_functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
