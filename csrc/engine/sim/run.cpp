#include "engine/sim/run.h"

#include <memory>
#include <stdexcept>
#include <utility>

#include "engine/cuda/cuda_backend.h"
#include "engine/sim/mock_driver.h"
#include "engine/sim/sim_backend.h"

namespace actckpt::sim {

DeviceConfig random_config(World* world, const std::string& without) {
  DeviceConfig config;
  config.window_bytes = (1 + world->below(12)) * kCellBytes;
  bool found = without.empty();
  for (const NamedRule& rule : kNamedRules) {
    if (without == rule.name) {
      config.rules.*rule.member = false;
      found = true;
    }
  }
  if (!found) {
    throw std::invalid_argument("no protocol rule is called '" + without + "'");
  }
  return config;
}

PoolConfig random_pool(World* world) {
  PoolConfig config;
  config.limit_bytes = (4 + world->below(60)) * kCellBytes;
  config.slab_bytes = 4 * kCellBytes;
  return config;
}

Report run_on_sim(std::uint64_t seed, const std::string& without) {
  World world(seed);
  Machine machine = Machine::make(&world);
  const DeviceConfig config = random_config(&world, without);
  const auto pool = std::make_shared<Pool>(random_pool(&world));
  auto backend = std::make_shared<SimBackend>(&world, machine.default_queues);
  auto engine = std::make_shared<DeviceEngine>(std::move(backend), pool, config);
  Program program(std::move(machine), std::move(engine));
  return program.run(*pool);
}

Report run_on_mock_cuda(std::uint64_t seed, const std::string& without, std::uint64_t fail_at,
                        int code) {
  World world(seed);
  Machine machine = Machine::make(&world);
  const DeviceConfig config = random_config(&world, without);
  MockDriver driver(&world, machine.default_queues);
  const auto backend = std::make_shared<cuda::CudaBackend>(driver.table());
  const auto pool = std::make_shared<Pool>(random_pool(&world), backend.get());
  auto engine = std::make_shared<DeviceEngine>(backend, pool, config);
  if (fail_at > 0) {
    driver.fail_at(fail_at, code);
  }
  Report report;
  {
    Program program(std::move(machine), std::move(engine));
    report = program.run(*pool);
  }
  report.num_faults = driver.faults().size() + driver.num_contexts_pushed();
  report.races.insert(report.races.end(), driver.faults().begin(), driver.faults().end());
  return report;
}

}  // namespace actckpt::sim
