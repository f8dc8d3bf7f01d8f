// One `offload` block: which saved tensors are offloaded, and their handles.
//
// See NOTE [ Offload ] in actckpt/_offload/session.py. One call per pack and one per unpack; Python code runs for
// subclasses and for leaves that do not require grad (they may be buffers). Thread rule: GIL held. Ownership: a session
// borrows its spans (span.h); it may die before its handles.
#pragma once

#include <pybind11/pybind11.h>

namespace actckpt {

void add_session_type(pybind11::module_& module);

}  // namespace actckpt
