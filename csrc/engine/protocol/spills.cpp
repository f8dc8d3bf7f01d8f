#include "engine/protocol/spills.h"

#include <algorithm>
#include <utility>

namespace actckpt {
namespace {

bool is_wanted(const Landing& landing) { return !landing.is_abandoned && !landing.error; }

}  // namespace

Spills::Spills(Backend* backend, const SpillSettings& settings, const ProtocolRules& rules, std::shared_ptr<Tier> tier,
               SlabRegistrar* registrar)
    : backend_(backend),
      rules_(rules),
      tier_(std::move(tier)),
      buffer_bytes_(settings.buffer_bytes),
      out_ring_(settings.num_out_buffers, settings.buffer_bytes, registrar),
      in_ring_(settings.num_in_buffers, settings.buffer_bytes, registrar) {}

Pieces Spills::cut(std::uint64_t bytes) {
  Pieces pieces;
  for (std::uint64_t offset = 0; offset < bytes; offset += buffer_bytes_) {
    auto piece = std::make_shared<Piece>();
    piece->offset = offset;
    piece->bytes = std::min<std::uint64_t>(buffer_bytes_, bytes - offset);
    piece->place = tier_->reserve(piece->bytes);
    if (piece->place == nullptr) {
      return {};
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

bool Spills::write_out(const PiecePtr& piece, Stream out, std::uintptr_t src) {
  Fences fences;
  std::byte* const buffer = out_ring_.take(backend_, &fences);
  if (buffer == nullptr) {
    return false;
  }
  piece->bounce = buffer;
  piece->state = PieceState::kInBounce;
  if (rules_.bounce_owner_waits) {
    for (const EventPtr& fence : fences) {
      backend_->wait(out, fence);
    }
  }
  backend_->copy_out(out, {buffer, piece->bytes}, src + piece->offset);
  piece->d2h = backend_->record(out);
  if (rules_.drain_waits_for_write_out) {
    writing_.push_back(piece);
  } else {
    begin_drain(piece);
  }
  return true;
}

void Spills::load(const Pieces& pieces, const LandingPtr& landing, std::uintptr_t dst, bool urgent) {
  for (const PiecePtr& piece : pieces) {
    if (piece->state == PieceState::kStored) {
      ++landing->num_missing;
      fetches_.push_back({piece, landing, dst + piece->offset, urgent, nullptr, nullptr, false});
      continue;
    }
    if (rules_.reload_waits_for_write_out) {
      backend_->wait(landing->in, piece->d2h);
    }
    backend_->copy_in(landing->in, dst + piece->offset, {piece->bounce, piece->bytes});
    landing->h2d = backend_->record(landing->in);
    piece->readers.push_back(landing->h2d);
  }
  if (urgent) {
    hurry(landing.get());
  }
}

void Spills::hurry(const Landing* landing) {
  for (Fetch& fetch : fetches_) {
    fetch.urgent = fetch.urgent || fetch.landing.get() == landing;
  }
  std::stable_partition(fetches_.begin(), fetches_.end(),
                        [&](const Fetch& fetch) { return fetch.landing.get() == landing; });
}

void Spills::drop(Pieces* pieces) {
  for (const PiecePtr& piece : *pieces) {
    piece->is_dropped = true;
    if (piece->state == PieceState::kInBounce) {
      writing_.remove(piece);
      free_bounce(piece.get(), true);
    } else if (piece->state == PieceState::kStuck) {
      counts_.stuck_bytes -= piece->bytes;
      free_bounce(piece.get(), false);
    }
    if (!rules_.place_outlives_dropped_haul) {
      piece->place = nullptr;
    }
  }
  pieces->clear();
}

bool Spills::advance() {
  end_copies();
  begin_fills();
  return is_busy();
}

void Spills::end_copies() {
  for (auto it = writing_.begin(); it != writing_.end();) {
    const PiecePtr piece = *it;
    if (!backend_->passed(piece->d2h)) {
      ++it;
      continue;
    }
    it = writing_.erase(it);
    begin_drain(piece);
  }
  for (auto it = draining_.begin(); it != draining_.end();) {
    const PiecePtr piece = *it;
    if (!piece->drain->ended()) {
      ++it;
      continue;
    }
    it = draining_.erase(it);
    end_drain(piece);
  }
  for (auto it = fetching_.begin(); it != fetching_.end();) {
    if (!it->fill->ended()) {
      ++it;
      continue;
    }
    end_fill(&*it);
    it = fetching_.erase(it);
  }
}

void Spills::begin_fills() {
  while (!fetches_.empty()) {
    if (is_wanted(*fetches_.front().landing)) {
      Fences ignored;
      std::byte* const buffer =
          rules_.fill_waits_for_bounce ? in_ring_.take_passed(backend_) : in_ring_.take(backend_, &ignored);
      if (buffer == nullptr) {
        break;
      }
      fetches_.front().bounce = buffer;
      begin_fill(std::move(fetches_.front()));
    }
    fetches_.pop_front();
  }
}

// Line 17.
void Spills::begin_drain(const PiecePtr& piece) {
  piece->drain = tier_->drain(piece->place, piece->bounce);
  piece->state = PieceState::kDraining;
  if (rules_.bounce_waits_for_drain) {
    draining_.push_back(piece);
  } else {
    piece->state = PieceState::kStored;
    free_bounce(piece.get(), true);
  }
}

void Spills::end_drain(const PiecePtr& piece) {
  const HaulError error = piece->drain->error();
  piece->drain = nullptr;
  if (error) {
    num_failed_drains_ = ++counts_.num_failed_drains;
    counts_.num_full_drains += error.kind == HaulError::kFull ? 1 : 0;
    counts_.last_error = error.message;
    if (!piece->is_dropped && rules_.failed_drain_keeps_bytes) {
      piece->place = nullptr;
      piece->state = PieceState::kStuck;
      counts_.stuck_bytes += piece->bytes;
      return;
    }
  }
  piece->state = PieceState::kStored;
  free_bounce(piece.get(), false);
}

// `with_write_out`: the host has not seen the write-out pass.
void Spills::free_bounce(Piece* piece, bool with_write_out) {
  Fences fences = std::move(piece->readers);
  if (with_write_out && piece->d2h != nullptr) {
    fences.push_back(piece->d2h);
  }
  out_ring_.give(std::exchange(piece->bounce, nullptr), std::move(fences));
}

// Line 18.
void Spills::begin_fill(Fetch fetch) {
  fetch.fill = tier_->fill(fetch.piece->place, fetch.bounce, fetch.urgent);
  fetching_.push_back(std::move(fetch));
  if (!rules_.reload_waits_for_fill) {
    copy_in(&fetching_.back());
  }
}

void Spills::end_fill(Fetch* fetch) {
  Landing* const landing = fetch->landing.get();
  if (const HaulError& error = fetch->fill->error()) {
    ++counts_.num_failed_fills;
    counts_.last_error = error.message;
    landing->error = error;
  } else if (is_wanted(*landing)) {
    copy_in(fetch);
  }
  in_ring_.give(fetch->bounce, fetch->is_copied ? Fences{landing->h2d} : Fences());
}

void Spills::copy_in(Fetch* fetch) {
  if (std::exchange(fetch->is_copied, true)) {
    return;
  }
  Landing* const landing = fetch->landing.get();
  const DeviceScope scope(backend_, landing->in.device);
  backend_->copy_in(landing->in, fetch->dst, {fetch->bounce, fetch->piece->bytes});
  landing->h2d = backend_->record(landing->in);
  --landing->num_missing;
}

}  // namespace actckpt
