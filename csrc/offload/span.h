// Stretches of storages that were moved to a store, and which saved tensors share them.
//
// NOTE [ Spans ]
//
// Rule 1. A storage is recognised by identity under a weak reference, never by its address alone: addresses are used
//         again.
// Rule 2. A tensor moves its whole storage where it covers half of it, else the stretch from its first to its last
//         byte. So an expanded tensor moves the bytes behind it, and a small view of a large storage its own span.
// Rule 3. A tensor whose bytes lie within a span that was moved at the same version shares it, if both are views of one
//         tensor, or that tensor: only then do they share a version counter. (`x.data` does not: its version says
//         nothing of what was done to x.)
//         Memory that was freed may hold something else when the storage has some again, at the same version: what was
//         moved before is shared with nobody any more (NOTE [ Sources ]).
// Rule 4. Where only a part of its bytes was moved so, the tensor moves the rest, and is joined from several spans when
//         it comes back: each byte is copied out once.
//
// Thread rule: GIL held. Ownership: handles own Spans; a Span owns its ticket, so when autograd releases the last
// tensor that shares it, the store gives the space back. Registry and records borrow Spans, which remove themselves.
#pragma once

#include <memory>
#include <vector>

#include "core/python.h"
#include "offload/sources.h"
#include "offload/store.h"

namespace actckpt {

struct SpanObject;

// What one session moved, and where a backward over it stands (NOTE [ Reading ahead ] in reading.py).
struct Record {
  std::vector<SpanObject*> spans;  // by place; null once gone
  std::vector<long long> sizes;
  std::size_t num_alive = 0;
  long long num_moved = 0;  // since it was made
  long long moved_bytes = 0;
  long long num_small = 0;  // storages that stay since what is saved of them is small, and those bytes
  long long small_bytes = 0;
  py::object meter;                // counts what of its values is alive; may be null
  std::weak_ptr<Record> previous;  // moved before it by this thread; backward reaches it after this one
  bool is_needed = true;           // backward reads it; else it is read at most where something went wrong

  long long task = -1;        // backward that `order` and all below belong to
  bool will_be_told = false;  // of that backward's end
  std::vector<std::size_t> order;
  std::vector<std::size_t> rank;  // by place
  std::size_t cursor = 0;         // of `order`: all before it was read or is being read ahead
  std::vector<std::size_t> seen;
  std::vector<bool> is_seen;

  void forget(std::size_t place) noexcept;
};

struct SpanObject {
  PyObject_HEAD PyObject* store;  // that the ticket is of
  std::unique_ptr<StoreTicket> ticket;
  PyObject* storage_reference;  // weak
  PyObject* root_reference;     // weak
  SourceWatchPointer watch;     // of what its ticket copied out
  PyObject* key;                // the storage, by identity; null: shared with nobody
  long long start;
  long long nbytes;
  long long version;
  long long num_saved;
  long long ahead_task;   // the backward that reads it ahead, and nobody asked yet; else -1
  long long ahead_bytes;  // that it takes of the window
  std::shared_ptr<Record> record;
  std::size_t place;
};

// What a tensor needs of its storage.
struct TensorExtent {
  PyObject* storage;  // borrowed
  PyObject* root;     // borrowed
  long long start;
  long long nbytes;
  long long version;
  long long element_size;
  long long offset_bytes;  // of the first element
};

// Where the bytes of a saved tensor are: a stretch of its storage.
struct Placed {
  std::vector<py::object> spans;  // none: they stay
  long long start = 0;            // of the stretch
  long long nbytes = 0;
  bool is_joined = false;  // from parts of the spans; else it is the only one

  // `span` null: they stay.
  static Placed in(py::object span);
};

inline SpanObject* span_of(PyObject* object) { return reinterpret_cast<SpanObject*>(object); }

// The span that holds `extent`, or null; then `overlapping` are those that hold a part of it.
py::object find_span(const TensorExtent& extent, std::vector<py::object>* overlapping);

// A new span; the last argument says whether others may share it.
py::object new_span(const TensorExtent& extent, PyObject* store, std::unique_ptr<StoreTicket> ticket,
                    SourceWatchPointer watch, bool may_share);

// Notes that one more saved tensor, of that storage, shares it.
void share(SpanObject* span, PyObject* storage);

void add_span_type(py::module_& module);

}  // namespace actckpt
