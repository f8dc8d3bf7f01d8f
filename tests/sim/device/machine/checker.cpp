#include "sim/device/machine/checker.h"

#include <algorithm>
#include <string>

namespace actckpt::sim_device {
namespace {

// At most one fault per access.
class Judge {
 public:
  Judge(const Access& access, const char* verb, const Clock& clock) : access_(access), verb_(verb), clock_(clock) {}

  void require(const Access& earlier, const char* did, std::size_t bytes) {
    if (is_said_ || earlier.queue < 0 || clock_.covers(earlier.queue, earlier.tick)) {
      return;
    }
    is_said_ = true;
    faults().add(described(access_) + " " + verb_ + " " + std::to_string(bytes) + " bytes that " + described(earlier) +
                 " " + did + ", and nothing orders the two");
  }

 private:
  const Access& access_;
  const char* const verb_;
  const Clock& clock_;
  bool is_said_ = false;
};

void note(std::vector<Access>* readers, const Access& access) {
  const auto found = std::find_if(readers->begin(), readers->end(),
                                  [&](const Access& reader) { return reader.queue == access.queue; });
  if (found != readers->end()) {
    *found = access;
  } else {
    readers->push_back(access);
  }
}

}  // namespace

Checker& checker() {
  static auto* const one = new Checker();
  return *one;
}

// The first piece at or behind `at`; none lies across it.
Checker::Pieces::iterator Checker::cut(std::uintptr_t at) {
  const auto next = pieces_.lower_bound(at);
  if (next == pieces_.begin()) {
    return next;
  }
  Piece& before = std::prev(next)->second;
  if (before.end <= at) {
    return next;
  }
  Piece rest = before;
  before.end = at;
  return pieces_.emplace_hint(next, at, std::move(rest));
}

void Checker::read(const Range& range, const Access& access, const Clock& clock) {
  if (range.bytes() == 0) {
    return;
  }
  Judge judge(access, "reads", clock);
  auto piece = cut(range.begin);
  const auto behind = cut(range.end);
  for (std::uintptr_t at = range.begin; at < range.end; ++piece) {
    if (piece == behind || piece->first > at) {  // nobody was here yet
      const std::uintptr_t end = piece == behind ? range.end : piece->first;
      piece = pieces_.emplace_hint(piece, at, Piece{end, {}, {}});
    }
    judge.require(piece->second.writer, "wrote", piece->second.end - at);
    note(&piece->second.readers, access);
    at = piece->second.end;
  }
}

void Checker::write(const Range& range, const Access& access, const Clock& clock) {
  if (range.bytes() == 0) {
    return;
  }
  Judge judge(access, "writes", clock);
  const auto first = cut(range.begin);
  const auto behind = cut(range.end);
  for (auto piece = first; piece != behind; ++piece) {
    const std::size_t bytes = piece->second.end - piece->first;
    judge.require(piece->second.writer, "wrote", bytes);
    for (const Access& reader : piece->second.readers) {
      judge.require(reader, "reads", bytes);
    }
  }
  pieces_.erase(first, behind);
  pieces_.emplace(range.begin, Piece{range.end, access, {}});
}

void Checker::forget(const Range& range) {
  const auto first = cut(range.begin);
  pieces_.erase(first, cut(range.end));
}

}  // namespace actckpt::sim_device
