// The lock of reruns that restore random state: two threads that swap the same generator would draw each other's
// numbers. See NOTE [ Random state ], Rules 3 and 4, in actckpt/_core/random_state.py.
#pragma once

#include "core/python.h"

namespace actckpt {

// Owns the right to swap random state during its lifetime.
class Swap {
 public:
  // `outer`: the swap during whose rerun the region was made, 0 for none. If that swap is still running, its owner
  // waits for this one, which therefore proceeds. Throws if another thread holds the lock for minutes.
  explicit Swap(long long outer);
  Swap(const Swap&) = delete;
  Swap& operator=(const Swap&) = delete;
  ~Swap() noexcept;

 private:
  bool locked_;
  long long previous_id_;
  unsigned long previous_thread_;
};

// The swap that this thread owns, 0: none.
long long current_swap() noexcept;

void add_swap_functions(py::module_& module);

}  // namespace actckpt
