// The exceptions of the engine.
//
// Contract: each message has three parts: what failed and where, the numbers of both sides, and
// what to do next. `csrc/bind/engine.cpp` maps every class to a Python exception of the same name.
// Thread rule: none; exceptions are values.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace actckpt {

class EngineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The pool's byte limit, or the system, refuses a block.
class HostPoolFullError : public EngineError {
 public:
  using EngineError::EngineError;
};

// The spill file cannot be opened or a write to it failed. The bytes are still where they were.
class SpillWriteError : public EngineError {
 public:
  using EngineError::EngineError;
};

// The same, because limit or file system have no room.
class SpillFullError : public SpillWriteError {
 public:
  using SpillWriteError::SpillWriteError;
};

// The memory of a tensor that was being offloaded was freed.
class SourceGoneError : public EngineError {
 public:
  using EngineError::EngineError;
};

// A read failed, or its bytes are not the ones that were written.
class SpillReadError : public EngineError {
 public:
  using EngineError::EngineError;
};

// The engine belongs to the process that forked this one.
class ForkedError : public EngineError {
 public:
  using EngineError::EngineError;
};

// The engine was shut down, or a ticket was used after its drop.
class ClosedError : public EngineError {
 public:
  using EngineError::EngineError;
};

// A device call failed; the message names the call and its code.
class DeviceError : public EngineError {
 public:
  using EngineError::EngineError;
};

// "1.5 MiB" for people, exact bytes below 1 KiB.
std::string format_bytes(std::uint64_t bytes);

// "No space left on device (errno 28)".
std::string format_errno(int code);

}  // namespace actckpt
