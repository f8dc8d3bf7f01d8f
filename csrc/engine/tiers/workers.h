// Threads that copy between memory and the spill file.
//
// Contract: jobs are started in order, urgent ones first. After each job, and repeatedly from `wake` on until it
// returns false, one of the threads calls `progress`: this notices device events without anybody waiting for them.
// Threads start with the first job or wake. With no threads, callers run the jobs. `stop` joins; jobs that were not
// started are never run by a thread.
// Thread rule: any thread; the calls take a leaf lock. `progress` is called with no lock held. Jobs must not throw. If
// the system refuses threads, the granted ones do all; if it granted none, `submit` and `wake` throw OffloadError, or
// callers run the jobs.
// Ownership: owns its threads.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
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
  using JobId = std::uint64_t;  // never 0
  enum class IfRefused { kThrow, kCallersRunJobs };

  // A shared pointer that leaks the workers in a forked child, where they cannot be joined.
  static std::shared_ptr<Workers> make(int num_threads, IfRefused if_refused = IfRefused::kThrow);
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers() noexcept { stop(); }

  // Before the first job.
  void set_progress(std::function<bool()> progress) { progress_ = std::move(progress); }

  // Without `wakes`, a thread that sleeps does not wake up for it: callers do, or the next job.
  JobId submit(Job job, bool urgent, bool wakes = true);
  void wake();

  // Removes a job that was not started; null if it was.
  Job take(JobId id);

  // Runs a job in this thread; false if there is none.
  bool run_one();

  // Starts the threads. How many the system granted; `why` it granted fewer.
  int start_all(std::string* why);

  std::size_t num_queued();

  // Idempotent.
  void stop() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  Workers(int num_threads, IfRefused if_refused) : num_threads_(num_threads), if_refused_(if_refused) {}
  void start(const Lock& lock);
  void start_or_throw(const Lock& lock);
  void work();
  void watch(Lock& lock);
  Job take_job();

  using Jobs = std::map<JobId, Job>;  // in the order of their submission

  const int num_threads_;
  const IfRefused if_refused_;
  const ForkGuard fork_guard_;
  std::function<bool()> progress_;
  std::mutex mutex_;  // leaf
  std::condition_variable changed_;
  JobId last_id_ = 0;
  Jobs urgent_;
  Jobs jobs_;
  bool is_stopped_ = false;
  int refusal_ = 0;          // errno; the system grants no more threads
  bool is_watched_ = false;  // a thread is in `watch`
  bool is_awake_ = false;    // a copy is pending
  std::vector<std::thread> threads_;
};

}  // namespace actckpt
