#include "sim/world.h"

#include <utility>

namespace actckpt::sim {
namespace {

std::uint64_t first_cell(Span span) { return span.address / kCellBytes; }

}  // namespace

World::World(std::uint64_t seed) : rng_(seed) {
  // Personalities: a device far behind the host, one that keeps up, and everything between.
  static constexpr double kEagerness[] = {0.0, 0.05, 0.3, 1.0, 3.0};
  eagerness_ = kEagerness[below(5)];
}

int World::add_queue(int device) {
  queues_.push_back({device, Clock(), {}});
  return static_cast<int>(queues_.size()) - 1;
}

// What the host has seen happens before what it puts into a queue.
std::uint32_t World::begin(int queue) {
  Clock& clock = queues_[static_cast<std::size_t>(queue)].clock;
  clock.join(host_);
  return clock.advance(queue);
}

void World::touch(int queue, std::uint32_t tick, Span span, bool writes, const char* what) {
  const Clock& clock = queues_[static_cast<std::size_t>(queue)].clock;
  for (std::uint64_t i = 0; i < span.num_cells; ++i) {
    if (writes) {
      checker_.write(first_cell(span) + i, queue, tick, clock, what);
    } else {
      checker_.read(first_cell(span) + i, queue, tick, clock, what);
    }
  }
}

void World::push(int queue, Operation operation) {
  queues_[static_cast<std::size_t>(queue)].pending.push_back(std::move(operation));
  let_adversary_run();
}

int World::record(int queue) {
  begin(queue);
  events_.push_back({queues_[static_cast<std::size_t>(queue)].clock, false, 0});
  const int event = static_cast<int>(events_.size()) - 1;
  push(queue, {nullptr, -1, event});
  return event;
}

void World::wait(int queue, int event) {
  begin(queue);
  queues_[static_cast<std::size_t>(queue)].clock.join(events_[static_cast<std::size_t>(event)].clock);
  push(queue, {nullptr, event, -1});
}

bool World::passed(int event) {
  let_adversary_run();
  EventState& state = events_[static_cast<std::size_t>(event)];
  if (state.passed) {
    host_.join(state.clock);
  }
  return state.passed;
}

void World::kernel(int queue, const std::vector<Input>& reads, Span written, const Values& values) {
  const std::uint32_t tick = begin(queue);
  for (const Input& input : reads) {
    touch(queue, tick, input.span, false, "kernel");
  }
  touch(queue, tick, written, true, "kernel");
  std::vector<std::pair<Span, Values>> expected;
  for (const Input& input : reads) {
    expected.emplace_back(input.span, *input.expected);
  }
  push(queue, {[this, expected = std::move(expected), written, values] {
                 for (const auto& [span, wanted] : expected) {
                   for (std::uint64_t i = 0; i < span.num_cells; ++i) {
                     num_wrong_ += memory_[first_cell(span) + i] != wanted[i] ? 1 : 0;
                   }
                 }
                 for (std::uint64_t i = 0; i < written.num_cells; ++i) {
                   memory_[first_cell(written) + i] = values[i];
                 }
               },
               -1, -1});
}

void World::copy(int queue, Span dst, Span src, const char* what) {
  const std::uint32_t tick = begin(queue);
  touch(queue, tick, src, false, what);
  touch(queue, tick, dst, true, what);
  push(queue, {[this, dst, src] {
                 for (std::uint64_t i = 0; i < dst.num_cells; ++i) {
                   memory_[first_cell(dst) + i] = memory_[first_cell(src) + i];
                 }
               },
               -1, -1});
}

void World::poison(int queue, Span span) {
  const std::uint32_t tick = begin(queue);
  touch(queue, tick, span, true, "poison on free");
  push(queue, {[this, span] {
                 for (std::uint64_t i = 0; i < span.num_cells; ++i) {
                   memory_[first_cell(span) + i] = kPoison;
                 }
               },
               -1, -1});
}

bool World::run_one(int queue) {
  Queue& q = queues_[static_cast<std::size_t>(queue)];
  if (q.pending.empty()) {
    return false;
  }
  const Operation& head = q.pending.front();
  if (head.waits_for >= 0 && !events_[static_cast<std::size_t>(head.waits_for)].passed) {
    return false;
  }
  if (head.effect) {
    head.effect();
  }
  ++num_run_;
  if (head.records >= 0) {
    EventState& event = events_[static_cast<std::size_t>(head.records)];
    event.passed = true;
    event.time = num_run_;
  }
  q.pending.pop_front();
  return true;
}

void World::let_adversary_run() {
  if (chance(0.02)) {
    starved_ = static_cast<int>(below(queues_.size() + 1)) - 1;  // a slow stream, for a while
  }
  double steps = eagerness_ * 2;
  while (steps > 0 && chance(std::min(1.0, steps))) {
    const int queue = static_cast<int>(below(queues_.size()));
    if (queue != starved_) {
      run_one(queue);
    }
    steps -= 0.5;
  }
}

void World::step() {
  for (std::uint64_t n = 1 + below(16); n > 0; --n) {
    run_one(static_cast<int>(below(queues_.size())));
  }
}

void World::drain() {
  for (bool progress = true; progress;) {
    progress = false;
    const std::size_t first = below(queues_.size());
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      progress |= run_one(static_cast<int>((first + i) % queues_.size()));
    }
  }
}

}  // namespace actckpt::sim
