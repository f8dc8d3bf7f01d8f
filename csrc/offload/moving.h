// Moving the bytes of one saved tensor: which stretch of its storage, what others moved of it already, and the rest.
//
// See NOTE [ Spans ] in span.h for the rules. Thread rule: GIL held.
#pragma once

#include <memory>

#include "offload/span.h"
#include "offload/store.h"

namespace actckpt {

// Where a session moves bytes to.
struct Destination {
  py::object store_object;  // keeps `store` alive: another thread may change where the session moves to
  std::shared_ptr<Store> store;
  std::shared_ptr<Record> record;
  bool must;  // wait for room rather than leave bytes where they are
};

// First byte and byte count of what `tensor` moves (Rule 2).
TensorExtent extent_of(PyObject* tensor, PyObject* root, PyObject* storage);

// Shares spans that hold all of `extent`, or moves it, or what no span holds of it. Without spans where the store has
// no room.
Placed place(const Destination& destination, PyObject* tensor, const TensorExtent& extent, bool may_share);

}  // namespace actckpt
