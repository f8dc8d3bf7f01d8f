// The pack hook of one rerun: it collects the tensors that the region saves this time, and checks that they match those
// of the forward.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

// Calls a method of the region's audit with the index of a saved tensor and `object`; does nothing if there is none.
void call_audit(const FrameObject* frame, PyObject* method, std::size_t index, PyObject* object);

// Starts a rerun of `frame` for `key`, since saved tensor `index` is unpacked.
py::object new_recomputed(FrameObject* frame, std::size_t index, const py::object& key);

// Pack hook of the rerun, as a bound method.
py::object recomputed_pack_of(const py::object& recomputed);

// Whether the pending Python error is the StopRerun of this recomputed, not of an enclosing rerun.
bool is_stop_of(PyObject* recomputed);

// The frame of the recomputed; borrowed.
PyObject* recomputed_frame(const py::object& recomputed);

// Sets Python's inputs of this rerun, for its errors.
void set_restored(const py::object& recomputed, py::object restored);

// Whether the pack hook found a tensor that differs from the forward's.
bool recomputed_found_mismatch(const py::object& recomputed);

// Whether the rerun saved other tensors than the forward, or too few.
bool recomputed_has_failed(const py::object& recomputed);

// Passes the values to the frame; the rerun is over.
void store_recomputed(const py::object& recomputed);

// Closes the recomputed: releases the frame and the collected values.
void close_recomputed(const py::object& recomputed) noexcept;

void add_recomputed_type(py::module_& module);

}  // namespace actckpt
