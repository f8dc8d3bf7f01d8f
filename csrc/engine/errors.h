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

class OffloadError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A limit, the system or the file system has no room. The bytes are still where they were.
class OffloadFullError : public OffloadError {
 public:
  using OffloadError::OffloadError;
};

// A read failed, or its bytes are not the ones that were written.
class OffloadReadError : public OffloadError {
 public:
  using OffloadError::OffloadError;
};

// The engine belongs to the process that forked this one.
class ForkedError : public OffloadError {
 public:
  using OffloadError::OffloadError;
};

// A device call failed; the message names the call and its code. Python sees an OffloadError.
class DeviceError : public OffloadError {
 public:
  using OffloadError::OffloadError;
};

// "1.5 MiB" for people, exact bytes below 1 KiB.
std::string format_bytes(std::uint64_t bytes);

// "No space left on device (errno 28)".
std::string format_errno(int code);

}  // namespace actckpt
