// The engine without Python, for the sanitizers: threads over pool, spill file and tiers, random programs through the
// event protocol. Usage: engine_tests FOLDER [SEEDS]

#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/disk/spill_file.h"
#include "engine/errors.h"
#include "engine/memory/pool.h"
#include "sim/run.h"
#include "tier_tests.h"

namespace actckpt {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::mt19937_64* rng, std::size_t bytes) {
  Bytes data(bytes);
  for (std::byte& value : data) {
    value = static_cast<std::byte>((*rng)());
  }
  return data;
}

template <typename Work>
void in_threads(int num_threads, const Work& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back(work, i);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void test_threads_share_a_pool() {
  PoolConfig config;
  config.slab_bytes = std::uint64_t{1} << 20;
  config.limit_bytes = std::uint64_t{16} << 20;
  Pool pool(config);
  in_threads(4, [&](int seed) {
    std::mt19937_64 rng(static_cast<std::uint64_t>(seed));
    for (int i = 0; i < 200; ++i) {
      const Block block = pool.allocate(1 + rng() % 500'000);
      for (const Segment& segment : block.segments()) {
        std::memset(segment.ptr, seed, segment.bytes);
      }
      for (const Segment& segment : block.segments()) {
        CHECK(segment.ptr[segment.bytes - 1] == static_cast<std::byte>(seed));
      }
      if (i % 20 == 0) {
        pool.trim();
      }
    }
  });
  CHECK(pool.stats().num_blocks == 0);
}

void test_threads_share_a_spill_file(const std::string& folder) {
  SpillConfig config;
  config.folder = folder;
  SpillFile file(config);
  in_threads(6, [&](int seed) {
    std::mt19937_64 rng(static_cast<std::uint64_t>(seed));
    for (int i = 0; i < 10; ++i) {
      const Bytes data = random_bytes(&rng, 1 + rng() % 200'000);
      std::optional<SpillBlock> block = file.try_reserve(data.size());
      const Slab buffer(round_up(data.size(), kGranule), nullptr);
      std::memcpy(buffer.data(), data.data(), data.size());
      file.write(&*block, buffer.data());
      std::memset(buffer.data(), 0, data.size());
      file.read(*block, buffer.data());
      CHECK(std::memcmp(buffer.data(), data.data(), data.size()) == 0);
    }
  });
  CHECK(file.stats().disk_bytes == 0);
}

void test_random_programs(std::uint64_t num_seeds) {
  for (std::uint64_t seed = 0; seed < num_seeds; ++seed) {
    const sim::Report report = sim::run_on_mock_cuda(seed, "", 0, 0);
    CHECK(report.num_races == 0);
    CHECK(report.num_wrong == 0);
    CHECK(report.num_leaked == 0);
    CHECK(report.num_faults == 0);
  }
}

}  // namespace
}  // namespace actckpt

int main(int argc, char** argv) {
  using namespace actckpt;
  const std::string folder = argc > 1 ? argv[1] : ".";
  test_threads_share_a_pool();
  test_threads_share_a_spill_file(folder);
  test_threads_share_tiers(folder);
  test_threads_over_a_failing_disk(folder);
  test_close_during_copies(folder);
  test_random_programs(argc > 2 ? std::stoul(argv[2]) : 300);
  std::puts("engine tests passed");
  return 0;
}
