// Where a slab's pages should lie, and touching them in parallel before they are pinned.
//
// Contract: best effort; a machine, container or kernel that refuses changes nothing but speed.
// Thread rule: any thread, no lock held. Ownership: none.

#pragma once

#include <cstddef>

#include "engine/cuda/driver.h"

namespace actckpt::cuda {

// The NUMA node of the host memory nearest to a device; -1 if the driver does not know.
int host_node_of(const Driver& driver, int device) noexcept;

// Prefers (never binds: that invites the OOM killer) `node` for pages touched later.
void prefer_node(void* ptr, std::size_t bytes, int node) noexcept;

// Touches all pages with several threads; one thread with 4 KiB pages takes 0.3 s/GiB.
void populate(void* ptr, std::size_t bytes) noexcept;

}  // namespace actckpt::cuda
