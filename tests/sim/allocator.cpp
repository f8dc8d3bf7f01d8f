#include "sim/allocator.h"

#include <algorithm>

namespace actckpt::sim {

Tensor::~Tensor() { allocator->free(this); }

void Tensor::record_stream(int other) {
  if (other != queue && std::find(recorded.begin(), recorded.end(), other) == recorded.end()) {
    recorded.push_back(other);
  }
}

TensorPtr Allocator::allocate(int queue, std::uint64_t num_cells) {
  settle();
  ++num_live_;
  auto& stack = free_[{queue, num_cells}];
  Span span{next_address_, num_cells};
  if (stack.empty()) {
    next_address_ += num_cells * kCellBytes;
  } else {
    span = stack.back();
    stack.pop_back();
  }
  return TensorPtr(new Tensor{this, queue, span, Values(num_cells), queue, {}});
}

void Allocator::free(Tensor* tensor) {
  --num_live_;
  if (tensor->recorded.empty()) {
    reuse(tensor->queue, tensor->span);
    return;
  }
  Waiting waiting{tensor->queue, tensor->span, {}};
  for (const int other : tensor->recorded) {
    waiting.events.push_back(world_->record(other));
  }
  waiting_.push_back(std::move(waiting));
}

void Allocator::reuse(int queue, Span span) {
  world_->poison(queue, span);
  free_[{queue, span.num_cells}].push_back(span);
}

void Allocator::settle() {
  for (std::size_t i = 0; i < waiting_.size();) {
    auto& events = waiting_[i].events;
    while (!events.empty() && world_->passed(events.back())) {
      events.pop_back();
    }
    if (!events.empty()) {
      ++i;
      continue;
    }
    const Waiting done = std::move(waiting_[i]);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    reuse(done.queue, done.span);
  }
}

}  // namespace actckpt::sim
