#include "engine/cuda/numa.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

namespace actckpt::cuda {
namespace {

constexpr int kMpolPreferred = 1;
constexpr int kMadvPopulateWrite = 23;  // since Linux 5.14
constexpr std::size_t kShareBytes = std::size_t{64} << 20;

}  // namespace

int host_node_of(const Driver& driver, int device) noexcept {
  Device handle = 0;
  int node = -1;
  if (driver.device_attribute == nullptr || driver.device_get(&handle, device) != kSuccess ||
      driver.device_attribute(&node, kAttributeHostNumaId, handle) != kSuccess) {
    return -1;
  }
  return node;
}

void prefer_node(void* ptr, std::size_t bytes, int node) noexcept {
  if (node < 0 || node >= 64) {
    return;
  }
  const unsigned long mask = 1UL << node;
  syscall(SYS_mbind, ptr, bytes, kMpolPreferred, &mask, sizeof(mask) * 8, 0);
}

void populate(void* ptr, std::size_t bytes) noexcept {
  const std::size_t num_cpus = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t num_shares = (bytes + kShareBytes - 1) / kShareBytes;
  const std::size_t num_threads = std::min({num_shares, num_cpus, std::size_t{8}});
  const auto touch = [=](std::size_t first) {
    for (std::size_t share = first; share < num_shares; share += num_threads) {
      const std::size_t start = share * kShareBytes;
      madvise(static_cast<char*>(ptr) + start, std::min(kShareBytes, bytes - start), kMadvPopulateWrite);
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 1; i < num_threads; ++i) {
      threads.emplace_back(touch, i);
    }
  } catch (const std::exception&) {  // fewer threads: the pages are touched when pinned
  }
  touch(0);
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace actckpt::cuda
