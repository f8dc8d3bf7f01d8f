// Watches the memory that the engine reads: whether it was replaced under a copy.
//
// See NOTE [ Sources ] in actckpt/_offload/sources.py. C++ that enlarges a storage frees its old memory, which others
// may fill before the copy has ended. The copy is then invalid.
// Thread rule: GIL held. Ownership: a Bytes object that is a source and its Span share a watch.
#pragma once

#include <memory>

#include "core/python.h"

namespace actckpt {

class SourceWatch {
 public:
  // `end` must be called before `storage` dies.
  explicit SourceWatch(PyObject* storage);
  SourceWatch(const SourceWatch&) = delete;
  SourceWatch& operator=(const SourceWatch&) = delete;
  ~SourceWatch() { end(); }

  // Address of the first byte at construction.
  long long address() const { return address_; }

  // All copies that read the storage have ended: later changes do not matter.
  void end() noexcept;

  // Whether the memory was replaced before `end`.
  bool is_replaced() noexcept;

 private:
  PyObject* storage_;  // borrowed; null after `end`
  const long long address_;
  const long long nbytes_;
  bool is_replaced_ = false;
};
using SourceWatchPointer = std::shared_ptr<SourceWatch>;

// Whether a copy out may be reading `storage`.
bool is_source(PyObject* storage);

}  // namespace actckpt
