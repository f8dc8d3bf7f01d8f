// References that the engine holds but never touches.
//
// Contract: a KeepAlive is an opaque, owned reference (for example to a tensor). The engine never copies or drops one;
// it returns each exactly once, in a Release. The caller drops them after the call, when no lock of the engine is held:
// dropping may take the GIL, an allocator's lock, or call back into the engine.
// Thread rule: values. Ownership: moves with the value; null owns nothing.

#pragma once

namespace actckpt {

using KeepAlive = void*;

}  // namespace actckpt
