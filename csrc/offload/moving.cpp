#include "offload/moving.h"

#include <algorithm>
#include <utility>

#include "core/reads.h"
#include "offload/bytes.h"
#include "offload/reading.h"

namespace actckpt {
namespace {

long long item(PyObject* tuple, Py_ssize_t i) {
  const long long value = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
  if (value == -1 && PyErr_Occurred() != nullptr) throw_pending();
  return value;
}

// Offloads `extent`; null if the store has no room, or would block a caller that must not wait.
py::object move(const Destination& destination, PyObject* tensor, const TensorExtent& extent, bool may_share) {
  const py::object bytes = new_bytes(extent.storage, extent.start);
  SourceWatchPointer watch = mark_as_source(bytes.ptr());
  if (!reads().is_cpu.is_true(tensor)) keep_tensor(bytes.ptr(), reads().detach(tensor));  // for `record_stream`
  const py::object device = reads().device(tensor);
  const Source source{bytes.ptr(), watch->address() + extent.start, extent.nbytes, device.ptr()};
  std::unique_ptr<StoreTicket> ticket = destination.store->put(source, destination.must);
  if (ticket == nullptr) return {};
  py::object span = new_span(extent, destination.store_object.ptr(), std::move(ticket), std::move(watch), may_share);
  note_moved(destination.record, span_of(span.ptr()));
  return span;
}

long long end_of(const SpanObject* span) { return span->start + span->nbytes; }

// Offloads the part of `extent` that the `overlapping` spans do not have, and shares these; nothing if bytes must stay.
std::vector<py::object> join(const Destination& destination, PyObject* tensor, const TensorExtent& extent,
                             std::vector<py::object> overlapping) {
  std::stable_sort(overlapping.begin(), overlapping.end(), [](const py::object& one, const py::object& other) {
    return span_of(one.ptr())->start < span_of(other.ptr())->start;
  });
  std::vector<py::object> joined;
  long long reached = extent.start;
  const auto move_until = [&](long long stop) {
    if (stop <= reached) return true;
    TensorExtent gap = extent;
    gap.start = reached;
    gap.nbytes = stop - reached;
    joined.push_back(move(destination, tensor, gap, true));
    reached = stop;
    return static_cast<bool>(joined.back());
  };
  for (const py::object& span : overlapping) {
    if (!move_until(span_of(span.ptr())->start)) return {};
    if (end_of(span_of(span.ptr())) <= reached) continue;
    joined.push_back(span);
    reached = end_of(span_of(span.ptr()));
  }
  if (!move_until(extent.start + extent.nbytes)) return {};
  for (const py::object& span : overlapping) share(span_of(span.ptr()), extent.storage);
  return joined;
}

}  // namespace

TensorExtent extent_of(PyObject* tensor, PyObject* root, PyObject* storage) {
  TensorExtent extent{};
  extent.storage = storage;
  extent.root = root;
  extent.version = version_of(tensor);
  extent.element_size = reads().element_size.number(tensor);
  extent.offset_bytes = reads().storage_offset.number(tensor) * extent.element_size;
  const py::object shape = reads().shape(tensor);
  const py::object stride = reads().stride(tensor);
  long long last = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.ptr()); ++i) {
    last += (item(shape.ptr(), i) - 1) * item(stride.ptr(), i);
  }
  extent.start = extent.offset_bytes;
  extent.nbytes = (last + 1) * extent.element_size;
  const long long whole = reads().nbytes.number(storage);
  if (2 * extent.nbytes >= whole) {
    extent.start = 0;
    extent.nbytes = whole;
  }
  return extent;
}

Placed place(const Destination& destination, PyObject* tensor, const TensorExtent& extent, bool may_share) {
  std::vector<py::object> overlapping;
  if (may_share) {
    py::object found = find_span(extent, &overlapping);
    if (found) {
      share(span_of(found.ptr()), extent.storage);
      sums().deduplicated_bytes += reads().tensor_nbytes.number(tensor);
      return Placed::in(std::move(found));
    }
  }
  if (overlapping.empty()) return Placed::in(move(destination, tensor, extent, may_share));
  return {join(destination, tensor, extent, std::move(overlapping)), extent.start, extent.nbytes, true};
}

}  // namespace actckpt
