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

std::shared_ptr<Workers> Workers::make(int num_threads) {
  return std::shared_ptr<Workers>(new Workers(num_threads), [](Workers* workers) {
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

int Workers::start_all(std::string* why) {
  const Lock lock(mutex_);
  start(lock);
  *why = refusal_ == 0 ? "" : format_errno(refusal_);
  return static_cast<int>(threads_.size());
}

void Workers::submit(Job job, bool urgent) {
  const Lock lock(mutex_);
  start(lock);
  (urgent ? urgent_ : jobs_).push_back(std::move(job));
}

void Workers::wake() {
  const Lock lock(mutex_);
  start(lock);
  if (!std::exchange(is_awake_, true) || has_jobs()) {
    changed_.notify_one();
  }
}

Workers::Job Workers::take_job() {
  std::deque<Job>& jobs = urgent_.empty() ? jobs_ : urgent_;
  if (jobs.empty()) {
    return nullptr;
  }
  Job job = std::move(jobs.front());
  jobs.pop_front();
  return job;
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
      if (has_jobs()) {
        changed_.notify_one();
      }
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
  while (!is_stopped_ && is_awake_ && !has_jobs()) {
    is_awake_ = false;  // a wake during `progress` counts
    lock.unlock();
    const bool is_busy = progress_();
    lock.lock();
    is_awake_ = is_awake_ || is_busy;
    if (is_awake_ && !is_stopped_ && !has_jobs()) {
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
