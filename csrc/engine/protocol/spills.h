// Device bytes below pinned memory: pieces that pass through bounce buffers, each way.
//
// Contract: lines 16-19 of the protocol (README.md here), the half of DeviceEngine that involves workers. A tensor is
// cut into pieces of one bounce buffer each.
// NOTE [Piece states]
//
//   Cut -> InBounce -> Draining -> Stored     the tier has the bytes, the buffer is free
//                         `------> Stuck      the write failed: the buffer keeps them
//
// A piece that is not stored is reloaded straight from its buffer. A stored one is fetched: a worker fills a buffer of
// the other ring, then H copies. Reloads have their own ring, so that stuck pieces never block one.
// `advance` continues everything that can proceed; it never waits. Waiters call it repeatedly.
// Thread rule: DeviceEngine serialises. Ownership: owns both rings; places belong to their pieces.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "engine/keep_alive.h"
#include "engine/protocol/backend.h"
#include "engine/protocol/ring.h"
#include "engine/protocol/rules.h"
#include "engine/protocol/tier.h"

namespace actckpt {

using Uses = std::vector<Stream>;

// A destination.
struct Landing {
  KeepAlive keep = nullptr;
  Stream home{0, 0};            // the stream it was allocated on
  Stream in{0, 0};              // the side stream that loads it
  EventPtr h2d;                 // of the last copy issued; null before the first
  Uses waited;                  // streams that wait for h2d
  std::size_t num_missing = 0;  // pieces whose copy was not issued yet
  HaulError error;              // of a fetch that failed
  bool is_abandoned = false;
  bool is_prefetch = false;  // not requested yet when it was started
};
using LandingPtr = std::shared_ptr<Landing>;

enum class PieceState { kCut, kInBounce, kDraining, kStored, kStuck };

struct Piece {
  std::uint64_t offset = 0;
  std::size_t bytes = 0;
  PlacePtr place;
  PieceState state = PieceState::kCut;
  std::byte* bounce = nullptr;  // holds the bytes unless they are stored
  EventPtr d2h;
  Fences readers;  // reloads straight from `bounce`
  HaulPtr drain;
  bool is_dropped = false;
};
using PiecePtr = std::shared_ptr<Piece>;
using Pieces = std::vector<PiecePtr>;

struct SpillSettings {
  std::size_t buffer_bytes = std::size_t{4} << 20;
  std::size_t num_out_buffers = 0;  // 0: nothing goes to the tier
  std::size_t num_in_buffers = 0;
};

struct SpillCounts {
  std::uint64_t num_failed_drains = 0;
  std::uint64_t num_full_drains = 0;  // of these: the disk was full
  std::uint64_t num_failed_fills = 0;
  std::uint64_t stuck_bytes = 0;  // in bounce buffers because their write failed
  std::string last_error;
};

class Spills {
 public:
  Spills(Backend* backend, const SpillSettings& settings, const ProtocolRules& rules, std::shared_ptr<Tier> tier,
         SlabRegistrar* registrar);

  // There is a tier, and both rings are mapped and pinned, if necessary just now.
  bool is_ready() { return tier_ != nullptr && out_ring_.num_buffers() > 0 && in_ring_.num_buffers() > 0; }

  // Cuts a tensor into pieces with space in the tier; empty if the tier is full.
  Pieces cut(std::uint64_t bytes);

  // How many buffers a write-out could take without waiting.
  std::size_t num_free_buffers() { return out_ring_.num_free(); }

  // Line 16. False if no buffer is free. `out` already waits for the source.
  bool write_out(const PiecePtr& piece, Stream out, std::uintptr_t src);

  // Line 18: starts to load all pieces; `landing->in` already waits for the destination.
  void load(const Pieces& pieces, const LandingPtr& landing, std::uintptr_t dst, bool urgent);

  // Pending fetches for `landing` come first from now on.
  void hurry(const Landing* landing);

  // Line 19. Makes no device call.
  void drop(Pieces* pieces);

  // Throws DeviceError. True while any copy is pending.
  bool advance();
  bool is_busy() const { return !writing_.empty() || !draining_.empty() || is_fetching(); }
  bool is_copying() const { return !writing_.empty(); }  // the device still copies out
  bool is_fetching() const { return !fetches_.empty() || !fetching_.empty(); }
  bool is_writing() const { return !writing_.empty() || !draining_.empty(); }

  std::uint64_t pinned_bytes() const { return out_ring_.mapped_bytes() + in_ring_.mapped_bytes(); }
  const SpillCounts& counts() const { return counts_; }
  std::uint64_t num_failed_drains() const { return num_failed_drains_; }  // any thread

 private:
  struct Fetch {
    PiecePtr piece;
    LandingPtr landing;
    std::uintptr_t dst;
    bool urgent;
    std::byte* bounce;
    HaulPtr fill;
    bool is_copied;
  };
  void end_copies();
  void begin_fills();
  void begin_drain(const PiecePtr& piece);
  void end_drain(const PiecePtr& piece);
  void begin_fill(Fetch fetch);
  void end_fill(Fetch* fetch);
  void copy_in(Fetch* fetch);
  void free_bounce(Piece* piece, bool with_write_out);

  Backend* const backend_;
  const ProtocolRules rules_;
  const std::shared_ptr<Tier> tier_;
  const std::size_t buffer_bytes_;
  Ring out_ring_;
  Ring in_ring_;
  std::list<PiecePtr> writing_;
  std::list<PiecePtr> draining_;
  std::deque<Fetch> fetches_;
  std::list<Fetch> fetching_;
  SpillCounts counts_;
  std::atomic<std::uint64_t> num_failed_drains_{0};  // as in counts_
};

}  // namespace actckpt
