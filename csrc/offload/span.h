// Spans: parts of storages that were offloaded, and shared by saved tensors.
//
// NOTE [ Spans ]
//
// A storage is recognised by identity under a weak reference, never by its address alone: addresses are reused.
//
// A tensor offloads its whole storage if it covers half of it, else the range from its first to its last byte. So an
// expanded tensor offloads the bytes behind it, and a small view of a large storage only its own range.
//
// A tensor whose bytes lie in a span of the same version shares the span, if both are views of one tensor, or that
// tensor. Only then do they share a version counter; that of `x.data` does not count changes of x. If memory was freed,
// the storage may later hold something else at the same version: its older spans are not shared any more
// (NOTE [ Sources ]).
//
// If a span has only part of its bytes, the tensor offloads the rest, and is joined from several spans when it is
// loaded. So each byte is copied out once.
//
// Thread rule: GIL held. Ownership: handles own Spans; a Span owns its ticket. So when autograd releases the last
// tensor that shares it, the store frees the space. Registry and records borrow Spans, which remove themselves.
#pragma once

#include <memory>
#include <vector>

#include "core/python.h"
#include "offload/sources.h"
#include "offload/store.h"

namespace actckpt {

struct SpanObject;

// The spans of one session, and the state of a backward over it (NOTE [ Prefetching ] in reading.py).
struct Record {
  std::vector<SpanObject*> spans;  // by place; null once dead
  std::vector<long long> sizes;
  std::size_t num_alive = 0;
  long long num_moved = 0;  // since its creation
  long long moved_bytes = 0;
  long long num_small = 0;  // storages that stay because little of them is saved, and those bytes
  long long small_bytes = 0;
  py::object meter;                // counts its live values; may be null
  std::weak_ptr<Record> previous;  // this thread's record before it; backward reaches it after this one
  bool is_needed = true;           // backward reads it; else it is read only if an audit fails

  long long task = -1;        // the backward that `order` and the fields below belong to
  bool will_be_told = false;  // registered for the end of that backward
  std::vector<std::size_t> order;
  std::vector<std::size_t> rank;  // by place
  std::size_t cursor = 0;         // in `order`: everything before it was read or is being prefetched
  std::vector<std::size_t> seen;
  std::vector<bool> is_seen;

  void forget(std::size_t place) noexcept;
};

struct SpanObject {
  PyObject_HEAD PyObject* store;  // of the ticket
  std::unique_ptr<StoreTicket> ticket;
  PyObject* storage_reference;  // weak
  PyObject* root_reference;     // weak
  SourceWatchPointer watch;     // of the bytes that its ticket copied out
  PyObject* key;                // the storage, by identity; null: not shared
  long long start;
  long long nbytes;
  long long version;
  long long num_saved;
  long long ahead_task;   // the backward that prefetched it, while not unpacked; else -1
  long long ahead_bytes;  // that it occupies in the window
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

// Where the bytes of a saved tensor are: a range of its storage.
struct Placed {
  std::vector<py::object> spans;  // none: they stay
  long long start = 0;            // of the range
  long long nbytes = 0;
  bool is_joined = false;  // from parts of several spans; else there is one span

  // `span` null: they stay.
  static Placed in(py::object span);
};

inline SpanObject* span_of(PyObject* object) { return reinterpret_cast<SpanObject*>(object); }

// The span that has all of `extent`, or null; then `overlapping` are those that have part of it.
py::object find_span(const TensorExtent& extent, std::vector<py::object>* overlapping);

// A new span; the last argument: others may share it.
py::object new_span(const TensorExtent& extent, PyObject* store, std::unique_ptr<StoreTicket> ticket,
                    SourceWatchPointer watch, bool may_share);

// One more saved tensor, of that storage, shares the span.
void share(SpanObject* span, PyObject* storage);

void add_span_type(py::module_& module);

}  // namespace actckpt
