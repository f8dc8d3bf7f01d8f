// Counts how many bytes of a region's values are alive at once.
//
// A storage counts once, from when it is first noted until it dies, whoever holds it.
// Thread rule: GIL held. Ownership: nothing noted is kept alive, nor does it keep a meter alive.
#pragma once

#include "core/python.h"

namespace actckpt {

// Counts `storage` on `meter`, and returns whether it was not counted yet; null or None counts nothing.
bool note_alive(PyObject* meter, PyObject* storage);

void add_meter_type(py::module_& module);

}  // namespace actckpt
