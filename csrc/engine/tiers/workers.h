// Threads that copy between memory and the spill file.
//
// Contract: jobs are started in order, urgent ones first, from the next `wake` on: to wake a thread takes longer than
// to copy a few pages, and whoever waits may run jobs. After each job, and repeatedly from `wake` on until it returns
// false, one of the threads calls `progress`: this notices device events without anybody waiting for them.
// Threads start with the first job or wake. `stop` joins; jobs that were not started are never run by a thread.
// Thread rule: any thread; the calls take a leaf lock. `progress` is called with no lock held. Jobs must not throw. If
// the system refuses threads, the granted ones do all. With none, those who wait run the jobs (`run_one`).
// Ownership: owns its threads.

#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/fork_guard.h"

namespace actckpt {

class Workers {
 public:
  using Job = std::function<void()>;

  // A shared pointer that leaks the workers in a forked child, where they cannot be joined.
  static std::shared_ptr<Workers> make(int num_threads);
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers() noexcept { stop(); }

  // Before the first job.
  void set_progress(std::function<bool()> progress) { progress_ = std::move(progress); }

  void submit(Job job, bool urgent);
  void wake();

  // Runs a job in this thread; false if there is none.
  bool run_one();

  // Starts the threads. How many the system granted; `why` it granted fewer.
  int start_all(std::string* why);

  // Idempotent.
  void stop() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  explicit Workers(int num_threads) : num_threads_(num_threads) {}
  void start(const Lock& lock);
  void work();
  void watch(Lock& lock);
  Job take_job();
  bool has_jobs() const { return !urgent_.empty() || !jobs_.empty(); }

  const int num_threads_;
  const ForkGuard fork_guard_;
  std::function<bool()> progress_;
  std::mutex mutex_;  // leaf
  std::condition_variable changed_;
  std::deque<Job> urgent_;
  std::deque<Job> jobs_;
  bool is_stopped_ = false;
  int refusal_ = 0;          // errno; the system grants no more threads
  bool is_watched_ = false;  // a thread is in `watch`
  bool is_awake_ = false;    // a copy is pending
  std::vector<std::thread> threads_;
};

}  // namespace actckpt
