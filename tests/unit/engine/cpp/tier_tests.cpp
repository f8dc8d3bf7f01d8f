// Device tickets below pinned memory with real workers, threads and bytes.

#include "tier_tests.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "eager_backend.h"
#include "engine/errors.h"
#include "engine/protocol/device_engine.h"
#include "engine/tiers/disk_tier.h"
#include "sim/faulty_file_io.h"

namespace actckpt {
namespace {

using Bytes = std::vector<std::byte>;
using Owner = std::shared_ptr<Bytes>;

// Python's lock: whoever is handed references drops them under it, so that what `get` answers cannot
// go before it is counted.
std::mutex gil;

// An engine with hardly any pinned memory, and its workers.
struct Rig {
  explicit Rig(const std::string& folder, std::shared_ptr<FileIo> io = nullptr) {
    PoolConfig pinned;
    pinned.limit_bytes = 3 * kGranule;
    SpillConfig spill;
    spill.folder = folder;
    Below below;
    below.tier = std::make_shared<DiskTier>(std::make_shared<SpillFile>(spill, std::move(io)), workers);
    below.wake = [this] { workers->wake(); };
    below.help = [this] { return workers->run_one(); };
    DeviceConfig config;
    config.window_bytes = 100'000;
    config.spill = {4 * kGranule, 4, 4};
    pool = std::make_shared<Pool>(pinned);
    engine = std::make_unique<DeviceEngine>(std::make_shared<EagerBackend>(), pool, config, std::move(below));
    workers->set_progress([this] { return engine->advance(); });
  }
  ~Rig() { workers->stop(); }

  const std::shared_ptr<Workers> workers = Workers::make(3);
  std::shared_ptr<Pool> pool;
  std::unique_ptr<DeviceEngine> engine;
};

// What a thread of a training program does, with the framework's part.
class DeviceUser {
 public:
  DeviceUser(DeviceEngine* engine, std::uint64_t seed) : engine_(engine), rng_(seed), stream_{0, seed + 1} {}

  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      step();
      finish();
    }
    for (const Live& live : live_) {
      engine_->drop(live.ticket, &releases_);
    }
    finish();
  }

 private:
  struct Live {
    DeviceTicketPtr ticket;
    Bytes expected;
  };

  void finish() {
    const std::lock_guard<std::mutex> lock(gil);
    for (const Release& release : releases_) {
      delete static_cast<Owner*>(release.keep);
    }
    releases_.clear();
  }

  void put() {
    auto owner = std::make_shared<Bytes>(1 + rng_() % 60'000);
    for (std::byte& value : *owner) {
      value = static_cast<std::byte>(rng_());
    }
    Bytes expected = *owner;
    const std::uintptr_t src = reinterpret_cast<std::uintptr_t>(owner->data());
    auto* const keep = new Owner(std::move(owner));
    const Put put = engine_->put(src, expected.size(), stream_, keep, rng_() % 2 == 0, &releases_);
    if (!put.holds_keep) {
      delete keep;
    }
    if (put.ticket != nullptr) {
      live_.push_back({put.ticket, std::move(expected)});
    }
  }

  void load(const Live& live, Side side) {
    auto* const keep = new Owner(std::make_shared<Bytes>(live.expected.size()));
    const std::uintptr_t dst = reinterpret_cast<std::uintptr_t>((*keep)->data());
    if (!engine_->load(live.ticket, stream_, dst, keep, side, &releases_)) {
      delete keep;
    }
  }

  void get(const Live& live) {
    for (;;) {
      GotKind kind;
      Owner found;
      {
        const std::lock_guard<std::mutex> lock(gil);
        const Got got = engine_->get(live.ticket, stream_, &releases_);
        kind = got.kind;
        found = got.keep == nullptr ? nullptr : *static_cast<Owner*>(got.keep);
      }
      if (found != nullptr) {
        CHECK(*found == live.expected);
        return;
      }
      if (kind == GotKind::kBusy) {
        engine_->wait(live.ticket);
      } else {
        load(live, Side::kUrgent);
      }
    }
  }

  void step() {
    const std::uint64_t choice = rng_() % 10;
    if (live_.empty() || choice < 4) {
      put();
      return;
    }
    const std::size_t i = rng_() % live_.size();
    if (choice < 5) {
      load(live_[i], Side::kIn);
    } else if (choice < 8) {
      get(live_[i]);
    } else if (choice < 9) {
      engine_->unload(live_[i].ticket, &releases_);
    } else {
      engine_->drop(live_[i].ticket, &releases_);
      live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  DeviceEngine* const engine_;
  std::mt19937_64 rng_;
  const Stream stream_;
  std::vector<Live> live_;
  Releases releases_;
};

void use_in_threads(DeviceEngine* engine, int num_threads) {
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([engine, i] { DeviceUser(engine, static_cast<std::uint64_t>(i)).run(200); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

void check_nothing_is_left(Rig* rig) {
  Releases releases;
  while (rig->engine->advance() || rig->engine->stats().inflight_bytes > 0) {
    rig->engine->poll(&releases);
  }
  rig->engine->poll(&releases);
  for (const Release& release : releases) {
    delete static_cast<Owner*>(release.keep);
  }
  const DeviceStats stats = rig->engine->stats();
  CHECK(stats.num_live == 0);
  CHECK(stats.graveyard_bytes == 0);
  CHECK(stats.spill.stuck_bytes == 0);
  CHECK(stats.tier_bytes == 0);
  CHECK(stats.num_tier_puts > 0);
}

}  // namespace

void test_threads_share_tiers(const std::string& folder) {
  Rig rig(folder);
  use_in_threads(rig.engine.get(), 4);
  check_nothing_is_left(&rig);
}

void test_threads_over_a_failing_disk(const std::string& folder) {
  auto io = std::make_shared<sim::FaultyFileIo>();
  sim::Faults faults;
  faults.fail_write_at = 40 * kGranule;
  io->set(faults);
  Rig rig(folder, io);
  use_in_threads(rig.engine.get(), 4);
  check_nothing_is_left(&rig);
}

// Engines end with copies under way: at process exit, nobody waits for a disk.
void test_close_during_copies(const std::string& folder) {
  auto rig = std::make_unique<Rig>(folder);
  Releases releases;
  std::vector<DeviceTicketPtr> tickets;
  std::vector<Bytes> sources(8, Bytes(60'000));  // outlive the engine, which keeps what may be read
  for (Bytes& source : sources) {
    const Put put = rig->engine->put(reinterpret_cast<std::uintptr_t>(source.data()), source.size(), {0, 1}, &source,
                                     true, &releases);
    CHECK(put.ticket != nullptr);
    tickets.push_back(put.ticket);
  }
  std::thread waiting([&] {
    try {
      rig->engine->wait(tickets.back());
    } catch (const DeviceError&) {
    }
  });
  rig->workers->stop();
  rig->engine->close();
  waiting.join();
  rig->engine->poll(&releases);
  bool raised = false;
  try {
    Bytes buffer(60'000);
    raised = !rig->engine->load(tickets.back(), {0, 1}, reinterpret_cast<std::uintptr_t>(buffer.data()), &buffer,
                                Side::kIn, &releases);  // the source is still held
  } catch (const DeviceError&) {
    raised = true;
  }
  CHECK(raised);
  rig.reset();
}

}  // namespace actckpt
