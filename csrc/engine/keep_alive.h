// References that the engine holds but never touches.
//
// Contract: a KeepAlive is an opaque, owned reference (for example to a tensor). The engine never copies or drops one;
// it returns each exactly once, by appending it to a Released list. The caller drops the contents of that list after
// the call, when no lock of the engine is held: dropping may take the GIL, an allocator's lock, or call back into the
// engine.
// Thread rule: values. Ownership: moves with the value; null owns nothing.

#pragma once

#include <vector>

namespace actckpt {

using KeepAlive = void*;
using Released = std::vector<KeepAlive>;

}  // namespace actckpt
