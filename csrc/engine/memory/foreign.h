// Reads memory of the program that may be unmapped meanwhile.
//
// A source is kept alive, but not its bytes: C++ that enlarges a tensor (`h.resize_(larger)`, an
// `out=` that must grow) frees them under a copy. Reading them as usual would then end the process.
//
// Contract: `copy_foreign` gives dst[:bytes] = src[:bytes], or throws SourceGoneError where no
// memory is at `src` any more; `dst` then holds garbage. It asks the system to read
// (process_vm_readv of this process), which takes longer than memcpy. Where the system
// refuses that, as some sandboxes do, it is memcpy; that is found out once, at the first call.
// Thread rule: any thread. Ownership: none.

#pragma once

#include <cstddef>
#include <string>

namespace actckpt {

void copy_foreign(std::byte* dst, const std::byte* src, std::size_t bytes);

// Why copy_foreign is memcpy here; empty where it is not.
const std::string& why_foreign_reads_are_plain();

}  // namespace actckpt
