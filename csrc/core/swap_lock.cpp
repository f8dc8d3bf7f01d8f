#include "core/swap_lock.h"

#include <pythread.h>

#include <memory>
#include <new>

#include "core/python.h"

namespace actckpt {
namespace {

// Reentrant; guarded by the GIL except for the waiting itself.
struct {
  PyThread_type_lock lock = nullptr;
  long long id = 0;  // of the current swap, 0: none
  unsigned long thread = 0;
  int depth = 0;
  long long last_id = 0;
} state;

constexpr long long kTimeoutMicroseconds = 300LL * 1000 * 1000;

void acquire() {
  const unsigned long thread = PyThread_get_thread_ident();
  if (state.depth > 0 && state.thread == thread) {
    state.depth += 1;
    return;
  }
  if (PyThread_acquire_lock(state.lock, NOWAIT_LOCK) == 0) {
    PyLockStatus status;
    Py_BEGIN_ALLOW_THREADS;
    status = PyThread_acquire_lock_timed(state.lock, kTimeoutMicroseconds, 0);
    Py_END_ALLOW_THREADS;
    if (status != PY_LOCK_ACQUIRED) raise(call(names().swap_timeout_error));
  }
  state.thread = thread;
  state.depth = 1;
}

// Swap as a context manager, for replay.
class SwapContext {
 public:
  explicit SwapContext(long long outer) : outer_(outer) {}
  void enter() { swap_ = std::make_unique<Swap>(outer_); }
  void exit(const py::args&) noexcept { swap_.reset(); }

 private:
  long long outer_;
  std::unique_ptr<Swap> swap_;
};

void release() noexcept {
  state.depth -= 1;
  if (state.depth > 0) return;
  state.thread = 0;
  PyThread_release_lock(state.lock);
}

}  // namespace

Swap::Swap(long long outer) : locked_(outer == 0 || outer != state.id) {
  if (locked_) acquire();
  previous_id_ = state.id;
  previous_thread_ = state.thread;
  state.id = ++state.last_id;
  state.thread = PyThread_get_thread_ident();
}

Swap::~Swap() noexcept {
  state.id = previous_id_;
  state.thread = previous_thread_;
  if (locked_) release();
}

long long current_swap() noexcept { return state.thread == PyThread_get_thread_ident() ? state.id : 0; }

void add_swap_functions(py::module_& module) {
  state.lock = PyThread_allocate_lock();
  if (state.lock == nullptr) throw std::bad_alloc();
  module.def("current_swap", current_swap, "The swap of random state this thread owns, or 0.");
  py::class_<SwapContext>(module, "Swap", "Owns the right to swap random state inside of a with block.")
      .def(py::init<long long>(), py::arg("outer"))
      .def("__enter__", &SwapContext::enter)
      .def("__exit__", &SwapContext::exit);
}

}  // namespace actckpt
