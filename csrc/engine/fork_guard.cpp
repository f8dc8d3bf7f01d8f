#include "engine/fork_guard.h"

#include <pthread.h>

#include <atomic>
#include <string>

#include "engine/errors.h"

namespace actckpt {
namespace {

std::atomic<std::uint64_t> generation{0};

void count_fork() { generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ForkGuard::ForkGuard() {
  static const int registered = pthread_atfork(nullptr, nullptr, &count_fork);
  if (registered != 0) {
    throw OffloadError("cannot register the fork handler: " + format_errno(registered) +
                       ". Free some memory and try again.");
  }
  generation_ = generation.load(std::memory_order_relaxed);
}

bool ForkGuard::forked() const noexcept { return generation_ != generation.load(std::memory_order_relaxed); }

void ForkGuard::check(const char* what) const {
  if (forked()) {
    throw ForkedError(std::string(what) +
                      ": this process was forked after the offload engine started; its threads and "
                      "memory stayed in the parent. Make the engine (or run backward) in the "
                      "process that packed, or start workers with the 'spawn' method.");
  }
}

}  // namespace actckpt
