// One tensor's bytes on their way to a store and back.
//
// Contract: NOTE [Ticket states]
//
//   out:  Queued -> Writing -> Stored            the store has the bytes
//            |         `-----> Kept              the write failed; the source stays
//            `---------------> Cancelled         dropped before a thread began
//   load: Queued -> Reading -> Ready | Failed    one destination; a ticket has at most one load
//
// A copy is in the engine's queue exactly while it is Queued: what ends before a thread starts it leaves nothing
// behind. Whoever moves Queued on (a worker or a caller) runs the copy, without the lock. A dropped ticket, or an
// abandoned load, whose copy is running is the graveyard: source, destination and stored bytes stay until that copy has
// ended.
// Thread rule: every field but the const ones is guarded by the engine's mutex, except that the
// thread which runs a copy reads `stored` and `dst` without it. Ownership: shared by handle and
// jobs.

#pragma once

#include <cstddef>
#include <exception>
#include <list>
#include <memory>
#include <utility>

#include "engine/byte_store.h"
#include "engine/keep_alive.h"

namespace actckpt {

enum class OutState { kQueued, kWriting, kStored, kKept, kCancelled };
enum class LoadState { kQueued, kReading, kReady, kFailed };

struct Load;
struct Ticket;
using TicketPtr = std::shared_ptr<Ticket>;
using LoadPtr = std::shared_ptr<Load>;
using Writes = std::list<TicketPtr>;
using Loads = std::list<std::pair<TicketPtr, LoadPtr>>;

struct Load {
  Load(std::byte* dst_, KeepAlive keep_) : dst(dst_), keep(keep_) {}

  std::byte* const dst;
  KeepAlive keep;
  LoadState state = LoadState::kQueued;
  Loads::iterator queued;  // valid while queued
  std::exception_ptr error;
  bool counted = false;  // in time or late: counted once
};

struct Ticket {
  Ticket(const std::byte* src_, std::size_t bytes_, ByteStore* store_, KeepAlive source_)
      : src(src_), bytes(bytes_), store(store_), source(source_) {}

  const std::byte* const src;
  const std::size_t bytes;
  ByteStore* const store;

  OutState out = OutState::kQueued;
  Writes::iterator queued;  // valid while queued
  KeepAlive source;         // null once released
  bool wanted = false;      // the source must outlive its write: it was returned or prefetched
  bool dropped = false;
  int num_readers = 0;
  std::unique_ptr<StoredBytes> stored;
  std::shared_ptr<Load> load;
};

}  // namespace actckpt
