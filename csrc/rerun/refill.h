// The pack hook of one rerun: it collects the tensors that the region saves this time and checks
// that they are those that the forward saved.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

// Starts a rerun of `frame` for `key`, since saved tensor `index` is asked for.
py::object new_refill(FrameObject* frame, std::size_t index, const py::object& key);

// Pack hook of the rerun, as a bound method.
py::object refill_pack_of(const py::object& refill);

// Whether the pending Python error is the StopRerun of this refill, not of a rerun around it.
bool is_stop_of(PyObject* refill);

// The frame that is refilled; borrowed.
PyObject* refill_frame(const py::object& refill);

// Whether the pack hook found a tensor that the forward did not save like that.
bool refill_found_mismatch(const py::object& refill);

// Whether the rerun saved something else than the forward, or too little.
bool refill_has_failed(const py::object& refill);

// Gives the values to the frame; the rerun is over.
void store_refill(const py::object& refill);

// Ends the rerun for good: releases the frame and of what was collected.
void close_refill(const py::object& refill) noexcept;

void add_refill_type(py::module_& module);

}  // namespace actckpt
