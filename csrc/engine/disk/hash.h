// XXH64: a 64-bit checksum at memory speed.
//
// Contract: gives the values of the published algorithm (Yann Collet, xxHash specification 0.1.1), with seed 0. It
// finds accidents, not attacks. Thread rule: any thread. Ownership: none.

#pragma once

#include <cstddef>
#include <cstdint>

namespace actckpt {

std::uint64_t hash64(const void* data, std::size_t bytes);

}  // namespace actckpt
