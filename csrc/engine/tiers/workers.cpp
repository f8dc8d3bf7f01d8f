#include "engine/tiers/workers.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <utility>

#include "engine/errors.h"

namespace actckpt {
namespace {

// Pause between event queries: short after something started, then longer and longer.
constexpr std::chrono::microseconds kFirstPause{50};
constexpr std::chrono::microseconds kLongestPause{500};

}  // namespace

std::shared_ptr<Workers> Workers::make(int num_threads, IfRefused if_refused) {
  return std::shared_ptr<Workers>(new Workers(num_threads, if_refused), [](Workers* workers) {
    if (!workers->fork_guard_.forked()) {
      delete workers;
    }
  });
}

void Workers::start(const Lock&) {
  try {
    while (refusal_ == 0 && !is_stopped_ && static_cast<int>(threads_.size()) < num_threads_) {
      threads_.emplace_back(&Workers::work, this);
    }
  } catch (const std::system_error& error) {
    refusal_ = error.code().value();  // the existing ones do all of it
  }
}

void Workers::start_or_throw(const Lock& lock) {
  start(lock);
  if (refusal_ != 0 && threads_.empty() && if_refused_ == IfRefused::kThrow) {
    const int refusal = std::exchange(refusal_, 0);  // the next call tries again
    throw OffloadError("No thread can be made to copy between host memory and disk, of " +
                       std::to_string(num_threads_) +
                       " that configure(num_workers=...) asks for: " + format_errno(refusal) +
                       ". Raise the limit of threads (ulimit -u, pids.max of the cgroup) or of memory (ulimit -v).");
  }
}

int Workers::start_all(std::string* why) {
  const Lock lock(mutex_);
  start(lock);
  *why = refusal_ == 0 ? "" : format_errno(refusal_);
  return static_cast<int>(threads_.size());
}

Workers::JobId Workers::submit(Job job, bool urgent, bool wakes) {
  const Lock lock(mutex_);
  start_or_throw(lock);
  (urgent ? urgent_ : jobs_).emplace(++last_id_, std::move(job));
  if (wakes) {
    changed_.notify_one();
  }
  return last_id_;
}

void Workers::wake() {
  const Lock lock(mutex_);
  start_or_throw(lock);
  if (!std::exchange(is_awake_, true)) {
    changed_.notify_one();
  }
}

Workers::Job Workers::take(JobId id) {
  const Lock lock(mutex_);
  for (Jobs* const jobs : {&urgent_, &jobs_}) {
    if (auto entry = jobs->extract(id)) {
      return std::move(entry.mapped());
    }
  }
  return nullptr;
}

std::size_t Workers::num_queued() {
  const Lock lock(mutex_);
  return urgent_.size() + jobs_.size();
}

Workers::Job Workers::take_job() {
  for (Jobs* const jobs : {&urgent_, &jobs_}) {
    if (!jobs->empty()) {
      return std::move(jobs->extract(jobs->begin()).mapped());
    }
  }
  return nullptr;
}

bool Workers::run_one() {
  Job job;
  {
    const Lock lock(mutex_);
    job = take_job();
  }
  if (job != nullptr) {
    job();
  }
  return job != nullptr;
}

void Workers::work() {
  Lock lock(mutex_);
  while (!is_stopped_) {
    if (Job job = take_job()) {
      lock.unlock();
      job();
      job = nullptr;  // releases its captures without the lock
      progress_();
      lock.lock();
    } else if (is_awake_ && !is_watched_) {
      watch(lock);
    } else {
      changed_.wait(lock);
    }
  }
}

// Queries events until no copy is pending, or a job turns up for this thread alone.
void Workers::watch(Lock& lock) {
  is_watched_ = true;
  auto pause = kFirstPause;
  while (!is_stopped_ && is_awake_ && urgent_.empty() && jobs_.empty()) {
    is_awake_ = false;  // a wake during `progress` counts
    lock.unlock();
    const bool is_busy = progress_();
    lock.lock();
    is_awake_ = is_awake_ || is_busy;
    if (is_awake_ && !is_stopped_ && urgent_.empty() && jobs_.empty()) {
      changed_.wait_for(lock, pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
  is_watched_ = false;
  if (is_awake_) {
    changed_.notify_one();  // another thread may watch
  }
}

void Workers::stop() noexcept {
  if (fork_guard_.forked()) {
    return;
  }
  std::vector<std::thread> threads;
  {
    const Lock lock(mutex_);
    is_stopped_ = true;
    threads.swap(threads_);
    changed_.notify_all();
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace actckpt
