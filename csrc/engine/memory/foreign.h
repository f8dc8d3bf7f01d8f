// Reads the program's memory, which may be unmapped meanwhile.
//
// A source is kept alive, but not its bytes: C++ that enlarges a tensor (`h.resize_(larger)`, an `out=` that must grow)
// frees them under a copy. A plain read would then end the process.
//
// Contract: `copy_foreign` sets dst[:bytes] = src[:bytes], or throws SourceGoneError if memory at `src` is unmapped;
// `dst` then holds garbage. It uses process_vm_readv on this process, which is slower than memcpy. If the system
// refuses that, as some sandboxes do, it is memcpy; that is determined once, at the first call.
// Thread rule: any thread. Ownership: none.

#pragma once

#include <cstddef>
#include <string>

namespace actckpt {

void copy_foreign(std::byte* dst, const std::byte* src, std::size_t bytes);

// Why copy_foreign is memcpy here; empty if it is not.
const std::string& why_foreign_reads_are_plain();

}  // namespace actckpt
