// Stretches of storages that were moved to a store, and which saved tensors share them.
//
// See NOTE [ Spans ] in actckpt/_offload/spans.py for the rules. Thread rule: GIL held. Ownership:
// handles own Spans; a Span owns its ticket, so when autograd lets go of the last tensor that
// shares it, the store gives the space back. Registry and records borrow Spans, which remove
// themselves.
#pragma once

#include <memory>
#include <vector>

#include "core/python.h"
#include "offload/sources.h"

namespace actckpt {

struct SpanObject;

// What one session moved, and where a backward over it stands (NOTE [ Reading ahead ] in reading.py).
struct Record {
  std::vector<SpanObject*> spans;  // by place; null once gone
  std::vector<long long> sizes;
  std::size_t num_alive = 0;
  long long num_moved = 0;  // since it was made
  long long moved_bytes = 0;
  long long num_small = 0;  // saved tensors that stay since they are small, and their bytes
  long long small_bytes = 0;
  py::object meter;                // counts what of its values is alive; may be null
  std::weak_ptr<Record> previous;  // moved before it by this thread; backward reaches it after this one

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
  PyObject_HEAD PyObject* backend;
  PyObject* ticket;
  PyObject* device;
  PyObject* nbytes_object;
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

extern PyTypeObject* span_type;
inline SpanObject* span_of(PyObject* object) { return reinterpret_cast<SpanObject*>(object); }

// The span that holds `extent`, or null; then `overlapping` are those that hold a part of it.
py::object find_span(const TensorExtent& extent, std::vector<py::object>* overlapping);

// A new span; the last argument says whether others may share it.
py::object new_span(const TensorExtent& extent, PyObject* backend, const py::object& ticket, SourceWatchPointer watch,
                    PyObject* device, bool may_share);

// Notes that one more saved tensor shares it.
void share(SpanObject* span);

// Storages of parameters that were seen, and whether one is of them (Rule 1 of NOTE [ Offload ]).
void note_owned(PyObject* storage);
bool is_known_owned(PyObject* storage);

void add_span_type(py::module_& module);

}  // namespace actckpt
