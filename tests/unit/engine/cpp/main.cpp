// The engine without Python, for the sanitizers: threads over pool, spill file and tickets, random
// programs through the event protocol. Usage: engine_tests FOLDER [SEEDS]

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/cpu/cpu_engine.h"
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
      const SpillBlock block = file.write(data.data(), data.size());
      Bytes back(data.size());
      file.read(block, back.data());
      CHECK(back == data);
    }
  });
  CHECK(file.stats().disk_bytes == 0);
}

// A tensor of the test: the engine's reference is a shared pointer on the heap.
using Owner = std::shared_ptr<Bytes>;

void drop_all(Released* released) {
  for (const KeepAlive keep : *released) {
    delete static_cast<Owner*>(keep);
  }
  released->clear();
}

class TicketUser {
 public:
  TicketUser(CpuEngine* engine, std::uint64_t seed) : engine_(engine), rng_(seed) {}

  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      step();
    }
    for (const Live& live : live_) {
      engine_->drop(live.ticket, &released_);
    }
    drop_all(&released_);
  }

 private:
  struct Live {
    CpuTicketPtr ticket;
    Bytes expected;
  };

  void put() {
    const auto owner = std::make_shared<Bytes>(random_bytes(&rng_, 1 + rng_() % 50'000));
    Bytes expected = *owner;
    auto* const keep = new Owner(owner);
    CpuTicketPtr ticket;
    while ((ticket = engine_->try_put(owner->data(), owner->size(), keep, true, &released_)) == nullptr) {
      engine_->make_room(owner->size());
    }
    live_.push_back({std::move(ticket), std::move(expected)});
  }

  void load(const Live& live, bool here) {
    const auto owner = std::make_shared<Bytes>(live.expected.size());
    auto* const keep = new Owner(owner);
    if (!engine_->load(live.ticket, owner->data(), keep, here, &released_)) {
      delete keep;
    }
  }

  void get(const Live& live) {
    Lookup found = engine_->look(live.ticket, &released_);
    while (found.found == Found::kBusy || found.found == Found::kNothing) {
      if (found.found == Found::kBusy) {
        engine_->wait(live.ticket);
      } else {
        load(live, true);
      }
      found = engine_->look(live.ticket, &released_);
    }
    CHECK(**static_cast<Owner*>(found.keep) == live.expected);
  }

  void step() {
    const std::uint64_t choice = rng_() % 10;
    if (live_.empty() || choice < 4) {
      put();
    } else {
      const std::size_t i = rng_() % live_.size();
      if (choice < 6) {
        load(live_[i], false);
      } else if (choice < 8) {
        get(live_[i]);
      } else if (choice < 9) {
        engine_->unload(live_[i].ticket, &released_);
      } else {
        engine_->drop(live_[i].ticket, &released_);
        live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    mine_.insert(mine_.end(), released_.begin(), released_.end());
    released_.clear();
    if (mine_.size() > 8) {
      drop_all(&mine_);
    }
  }

 public:
  ~TicketUser() { drop_all(&mine_); }

 private:
  CpuEngine* const engine_;
  std::mt19937_64 rng_;
  std::vector<Live> live_;
  Released released_;
  Released mine_;
};

std::shared_ptr<SpillFile> spill_file(const std::string& folder) {
  SpillConfig config;
  config.folder = folder;
  return std::make_shared<SpillFile>(config);
}

void test_threads_share_an_engine(const std::string& folder, int num_workers) {
  const std::shared_ptr<SpillFile> file = spill_file(folder);
  const auto engine = CpuEngine::make(file, CpuConfig{num_workers, 200'000});
  // References cross threads: each thread drops what its calls were handed.
  in_threads(4, [&](int seed) { TicketUser(engine.get(), static_cast<std::uint64_t>(seed)).run(150); });
  engine->flush();
  Released released;
  engine->shutdown();
  engine->collect(&released);
  drop_all(&released);
  CHECK(engine->stats().num_live == 0);
  CHECK(engine->stats().num_queued == 0);
  CHECK(engine->stats().stored_bytes == 0);
  CHECK(engine->stats().graveyard_bytes == 0);
  CHECK(file->stats().disk_bytes == 0);
}

void test_shutdown_during_copies(const std::string& folder) {
  const auto engine = CpuEngine::make(spill_file(folder), CpuConfig());
  Released released;
  std::vector<CpuTicketPtr> tickets;
  for (int i = 0; i < 20; ++i) {
    auto* const keep = new Owner(std::make_shared<Bytes>(100'000));
    tickets.push_back(engine->try_put((*keep)->data(), 100'000, keep, true, &released));
  }
  engine->shutdown();
  for (const CpuTicketPtr& ticket : tickets) {
    engine->drop(ticket, &released);
  }
  drop_all(&released);
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
  test_threads_share_an_engine(folder, 2);
  test_threads_share_an_engine(folder, 0);
  test_shutdown_during_copies(folder);
  test_threads_share_tiers(folder);
  test_threads_over_a_failing_disk(folder);
  test_close_during_copies(folder);
  test_random_programs(argc > 2 ? std::stoul(argv[2]) : 300);
  std::puts("engine tests passed");
  return 0;
}
