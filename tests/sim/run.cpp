#include "sim/run.h"

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/cuda/cuda_backend.h"
#include "sim/mock_driver.h"
#include "sim/sim_tier.h"

namespace actckpt::sim {
namespace {

SpillSettings random_spills(World* world) {
  SpillSettings settings;
  settings.buffer_bytes = (1 + world->below(2)) * kCellBytes;
  settings.num_out_buffers = world->below(6);
  settings.num_in_buffers = 1 + world->below(3);
  return settings;
}

// Served by one to three workers.
std::shared_ptr<SimTier> random_tier(World* world) {
  std::vector<int> workers;
  for (std::uint64_t n = 1 + world->below(3); n > 0; --n) {
    workers.push_back(world->add_queue(0));
  }
  const bool fails = world->chance(0.3);
  TierConfig config;
  config.num_cells = world->below(60);
  config.drain_failures = fails ? 0.1 : 0.0;
  config.fill_failures = fails ? 0.05 : 0.0;
  return std::make_shared<SimTier>(world, workers, config);
}

}  // namespace

ProtocolRules rules_without(const std::string& name) {
  ProtocolRules rules;
  bool found = name.empty();
  for (const NamedRule& rule : kNamedRules) {
    if (name == rule.name) {
      rules.*rule.member = false;
      found = true;
    }
  }
  if (!found) {
    throw std::invalid_argument("no protocol rule is called '" + name + "'");
  }
  return rules;
}

DeviceConfig random_config(World* world, const std::string& without) {
  DeviceConfig config;
  config.window_bytes = (1 + world->below(12)) * kCellBytes;
  config.rules = rules_without(without);
  config.spill = random_spills(world);
  return config;
}

// Half of the machines have little pinned memory, so that much passes through the tier below.
PoolConfig random_pool(World* world) {
  PoolConfig config;
  config.limit_bytes = (world->chance(0.5) ? world->below(8) : 4 + world->below(60)) * kCellBytes;
  config.slab_bytes = 4 * kCellBytes;
  return config;
}

Report run_on_mock_cuda(std::uint64_t seed, const std::string& without, std::uint64_t fail_at, int code) {
  World world(seed);
  Machine machine = Machine::make(&world);
  const DeviceConfig config = random_config(&world, without);
  MockDriver driver(&world, machine.default_queues);
  const auto backend = std::make_shared<cuda::CudaBackend>(driver.table());
  const auto pool = std::make_shared<Pool>(random_pool(&world), backend.get());
  const auto tier = random_tier(&world);
  auto engine = std::make_shared<DeviceEngine>(backend, pool, config, Below{tier, backend.get()},
                                               [&world](auto&) { world.step(); });
  if (fail_at > 0) {
    driver.fail_at(fail_at, code);
  }
  Report report;
  {
    Program program(std::move(machine), std::move(engine));
    report = program.run(*pool, *tier);
  }
  report.num_faults = driver.faults().size() + driver.num_contexts_pushed();
  report.races.insert(report.races.end(), driver.faults().begin(), driver.faults().end());
  return report;
}

}  // namespace actckpt::sim
