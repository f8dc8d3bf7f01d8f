#include "engine/protocol/stream_waits.h"

#include <utility>

namespace actckpt {

void StreamWaits::wait(Backend* backend, Stream stream, const EventPtr& event) {
  EventPtr before = backend->record_timed(stream);
  backend->wait(stream, event);
  if (before == nullptr) {
    return;
  }
  EventPtr after = backend->record_timed(stream);
  waits_.push_back({std::move(before), std::move(after)});
}

StreamWaits::Sum StreamWaits::settle(Backend* backend) {
  Sum sum;
  while (!waits_.empty() && backend->passed(waits_.front().after)) {
    const Wait wait = std::move(waits_.front());
    waits_.pop_front();
    const double seconds = backend->seconds_between(wait.before, wait.after);
    sum.seconds += seconds;
    sum.num_late += seconds >= kLateSeconds ? 1 : 0;
  }
  return sum;
}

}  // namespace actckpt
