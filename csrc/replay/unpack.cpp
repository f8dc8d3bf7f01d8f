#include "replay/unpack.h"

#include <optional>
#include <utility>

#include "core/grad_mode.h"
#include "core/locked.h"
#include "core/python.h"
#include "core/reads.h"
#include "core/rescue.h"
#include "core/swap_lock.h"
#include "graph/needs.h"
#include "graph/window.h"
#include "record/known_storages.h"
#include "record/module_calls.h"
#include "record/paused.h"
#include "replay/execute.h"
#include "replay/repeated_collectives.h"

namespace actckpt::replay {
namespace {

// What a saved tensor is restored from: one of the two tensors.
struct Found {
  py::object tensor;      // as the hooks around the region returned it
  py::object base;        // on its storage
  bool is_fresh = false;  // nobody else has `base`
};

Found found_of(TapeObject* tape, HandleObject* handle, ValueObject* value) {
  Found found;
  if (!is_none(value->held)) {
    found.base = bytes_of(tape, value, handle->window, handle->clock, nullptr);
    return found;
  }
  // Also if nothing is replayed: outer hooks may rerun, which swaps states. Taken before the tape's lock: Rule 3 of
  // NOTE [ Random state ].
  std::optional<Swap> swap;
  if (tape->swap >= 0) swap.emplace(tape->swap);
  const Locked locked(tape->lock);
  repeat_collectives(tape, value);
  if (is_none(value->cached) && !is_none(value->stored)) {
    const py::object stored = py::reinterpret_borrow<py::object>(value->stored);
    found.tensor = call_with(names().saved_piece, stored.ptr(), handle->window);
    if (!found.tensor.is_none()) return found;
    found.tensor = py::object();
  }
  found.base =
      with_rescue(py::none(), [&] { return bytes_of(tape, value, handle->window, handle->clock, &found.is_fresh); });
  return found;
}

// Whether neither grad mode nor a dispatch mode affects aliases made now.
bool is_neutral() { return !is_grad_enabled() && PyLong_AsLong(call(names().num_dispatch_modes).ptr()) == 0; }

// Whether both share a storage. Before a region overwrites a parameter, the bytes are copied (NOTE [ Replay ], Rule 1).
bool is_on_storage_of(PyObject* one, PyObject* other) {
  return reads().untyped_storage(one).ptr() == reads().untyped_storage(other).ptr();
}

// A tensor like the saved one that nobody else has.
py::object fresh(const HandleObject* handle, const Found& found) {
  std::optional<Pause> pause;
  if (!is_neutral()) pause.emplace();
  if (found.tensor) return reads().detach(found.tensor.ptr());
  if (!is_none(handle->alias) && is_on_storage_of(found.base.ptr(), handle->alias)) {
    return reads().detach(handle->alias);
  }
  return on(found.base.ptr(), reinterpret_cast<WindowObject*>(handle->window), found.is_fresh);
}

// Records the backward that unpacks a handle; undone if unpacking fails.
class Unpacking {
 public:
  explicit Unpacking(HandleObject* handle) : handle_(handle), previous_(std::exchange(handle->task, current_task())) {}
  Unpacking(const Unpacking&) = delete;
  Unpacking& operator=(const Unpacking&) = delete;
  ~Unpacking() noexcept {
    if (!is_done_) handle_->task = previous_;
  }
  void done() noexcept { is_done_ = true; }

 private:
  HandleObject* handle_;
  long long previous_;
  bool is_done_ = false;
};

// The saved tensor object itself if it is available, else `alias` with its attributes.
py::object as_saved(const HandleObject* handle, py::object alias) {
  return handle->original != nullptr ? handle->original->resolved(std::move(alias)) : alias;
}

py::object unpacked(HandleObject* handle) {
  auto* tape = reinterpret_cast<TapeObject*>(handle->tape);
  const auto value_held = py::reinterpret_borrow<py::object>(reinterpret_cast<WindowObject*>(handle->window)->value);
  auto* value = as_value(value_held);
  if (tape->is_open != 0) call_with(names().unpacked_inside, handle->tape, value_held.ptr());
  Unpacking unpacking(handle);
  const Found found = found_of(tape, handle, value);
  unpacking.done();
  release_needs(value, handle->task);
  py::object tensor = fresh(handle, found);
  if (!is_none(handle->audit) && is_none(value->held)) {
    tensor = call_with(names().audited, reinterpret_cast<PyObject*>(handle), tensor.ptr());
  }
  if (tape->is_open != 0) note_unpacked(tape, tensor.ptr(), value_held.ptr());  // NOTE [ Replay ], Rule 7
  return as_saved(handle, std::move(tensor));
}

PyObject* unpack(PyObject*, PyObject* packed) {
  return guarded([&]() -> PyObject* {
    if (Py_TYPE(packed) != handle_type) return call_method(packed, names().unpack).release().ptr();
    const auto held = py::reinterpret_borrow<py::object>(packed);
    auto* handle = reinterpret_cast<HandleObject*>(packed);
    PyObject* calls = reinterpret_cast<TapeObject*>(handle->tape)->calls;
    if (!is_none(calls)) end_step(calls);
    return unpacked(handle).release().ptr();
  });
}

}  // namespace

void add_unpack_functions(py::module_& module) {
  static PyMethodDef methods[] = {{"unpack_recorded", unpack, METH_O, "unpack_recorded(packed)"},
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace actckpt::replay
