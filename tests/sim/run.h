// Runs one random program through the CUDA backend and a mock driver, and judges it.
//
// Contract: everything follows from the seed but the addresses of host memory. `without` names a
// rule of the protocol to leave out, "" none. Throws std::invalid_argument for unknown names.
// Thread rule: one run at a time (the mock driver is a table of plain functions).

#pragma once

#include <cstdint>
#include <string>

#include "sim/program.h"

namespace actckpt::sim {

// `num_faults` counts what the mock objects to.
// `fail_at`: the driver call that fails with `code`, as do all later ones; 0 for none.
Report run_on_mock_cuda(std::uint64_t seed, const std::string& without, std::uint64_t fail_at, int code);

// All rules but one; all where there is no name.
ProtocolRules rules_without(const std::string& name);
DeviceConfig random_config(World* world, const std::string& without);
PoolConfig random_pool(World* world);

}  // namespace actckpt::sim
