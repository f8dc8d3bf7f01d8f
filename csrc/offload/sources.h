// Watches the memory that the engine reads: whether it was replaced under a copy.
//
// See NOTE [ Sources ] in actckpt/_offload/sources.py. C++ that enlarges a storage frees its old memory, which others
// may fill before the copy has ended. The copy is then invalid; the storage has the saved bytes, since growing moves
// them along. Thread rule: GIL held. Ownership: a Bytes object that is a source and its Span share a watch.
#pragma once

#include <memory>

#include "core/python.h"

namespace actckpt {

class SourceWatch {
 public:
  // `storage` must outlive the watch, or `end` must be called before it dies.
  explicit SourceWatch(PyObject* storage);
  SourceWatch(const SourceWatch&) = delete;
  SourceWatch& operator=(const SourceWatch&) = delete;
  ~SourceWatch();

  // Address of the first byte at construction.
  long long address() const { return address_; }

  // All copies that read the storage have ended: later changes do not matter.
  void end() noexcept;

  // The storage, if its memory was replaced before `end`; from then on it is owned. Else null.
  PyObject* replaced_storage() noexcept;

 private:
  bool is_as_it_was() const;

  PyObject* storage_;  // borrowed; owned once replaced; null after `end`
  long long address_;
  long long nbytes_;
  bool is_replaced_ = false;
};
using SourceWatchPointer = std::shared_ptr<SourceWatch>;

// Whether a copy out may be reading `storage`.
bool is_source(PyObject* storage);

// Ends all watches of `storage`.
void end_sources(PyObject* storage) noexcept;

}  // namespace actckpt
