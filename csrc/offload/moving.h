// Offloading the bytes of one saved tensor: which part of its storage, what other spans already have of it, and the
// rest.
//
// See NOTE [ Spans ] in span.h. Thread rule: GIL held.
#pragma once

#include <memory>

#include "offload/span.h"
#include "offload/store.h"

namespace actckpt {

// Where a session offloads to.
struct Destination {
  py::object store_object;  // keeps `store` alive: another thread may change the session's store
  std::shared_ptr<Store> store;
  std::shared_ptr<Record> record;
  bool must;  // wait for room instead of leaving the bytes in place
};

// First byte and byte count of the memory that `tensor` offloads.
TensorExtent extent_of(PyObject* tensor, PyObject* root, PyObject* storage);

// Shares a span that has all of `extent`, or offloads what no span has of it. Without spans if the store has no room.
Placed place(const Destination& destination, PyObject* tensor, const TensorExtent& extent, bool may_share);

}  // namespace actckpt
