// Detects that this process is a fork of the one that made an object.
//
// NOTE [Fork]: a forked child has none of its parent's threads, a mutex may stay locked forever, and the pool's slabs
// are not mapped (MADV_DONTFORK). So the child must not touch an engine of its parent: every call raises ForkedError,
// and drops and destructors leave everything alone. The atfork handler only increments a counter. A child may make its
// own engines.
//
// Thread rule: any thread. Ownership: a value.

#pragma once

#include <cstdint>

namespace actckpt {

class ForkGuard {
 public:
  ForkGuard();

  // True in a child that was forked after this guard was made.
  bool forked() const noexcept;

  // Raises ForkedError, naming `what`, if forked().
  void check(const char* what) const;

 private:
  std::uint64_t generation_;
};

}  // namespace actckpt
