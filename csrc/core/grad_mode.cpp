#include "core/grad_mode.h"

namespace actckpt {

bool is_grad_enabled() { return call_without_arguments(names().is_grad_enabled).ptr() == Py_True; }

}  // namespace actckpt
