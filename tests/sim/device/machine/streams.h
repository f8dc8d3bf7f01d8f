// Streams, events, and the host among them.
//
// Contract: a stream runs its tasks in order. Kernels run when they are launched, after everything that their stream
// has been given before; copies, fills and waits lie in its queue until something forces them: a kernel, a
// synchronisation, a wait of another stream that is forced, a query (a step), or the adversary. They run in the
// thread that forces them, so that a program is the same each time. What is ordered is another question: clocks are
// joined when work is given, in the program's order, whatever the adversary does later.
//  - The host is one agent: its threads are taken as ordered among themselves. Work is ordered after what the host
//    knew when it gave it; the host knows what a synchronisation or a successful query told it.
//  - Time is simulated: a stream's clock in seconds moves on by what its copies cost on the link, and by `advance`.
//    A host that gives work runs beside the kernels that it gave last: what ends after these has not passed yet when
//    it asks, which takes it a moment.
// Thread rule: under the machine's lock, which `force` gives up while another thread runs the stream.
// Ownership: streams live for good.

#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <thread>

#include "sim/device/machine/basics.h"

namespace actckpt::sim_device {

struct Task {
  enum class Kind { kCopy, kFill, kWait };
  Kind kind;
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::size_t bytes = 0;
  Stream* other = nullptr;  // of a wait, and up to where
  std::uint64_t position = 0;
};

struct Stream {
  int device;
  std::int64_t id;  // 0: the device's default stream
  std::deque<Task> tasks;
  std::uint64_t issued = 0;
  std::uint64_t done = 0;
  std::thread::id runner;  // the thread that runs a kernel or task of it now
  int depth = 0;           // of kernels inside kernels; 0: nothing runs
  int queue = -1;          // in clocks; -1: none yet
  std::uint32_t last_tick = 0;
  Clock clock;
  double time_s = 0.0;
  bool is_capturing = false;

  bool is_run_here() const { return depth > 0 && runner == std::this_thread::get_id(); }
};

// A place in a stream's order: what an event records.
struct Point {
  Stream* stream = nullptr;  // null: nothing, which has passed
  std::uint64_t position = 0;
  Clock clock;
  std::uint32_t tick = 0;  // of the stream
  std::uint64_t epoch = 0;
  double time_s = 0.0;
};

enum class Direction { kToHost, kToDevice };

struct Adversary {
  std::mt19937_64 random{0};
  double eagerness = 0.0;   // how probably a step is taken at each call; 0: everything as late as it can be
  double reluctance = 0.0;  // how probably a query takes no step, and tells nothing new
  std::thread::id asker{};  // the only thread whose queries may; of none: all may
  bool is_reluctant() {
    const bool is_other = asker != std::thread::id{} && asker != std::this_thread::get_id();
    return is_other || chance(reluctance);
  }
  bool chance(double probability) { return static_cast<double>(random() >> 11) * 0x1p-53 < probability; }
};

class Streams {
 public:
  Streams();

  Stream* find(int device, std::int64_t id) const;  // null: there is none
  bool knows(const Stream* stream) const;
  std::vector<std::int64_t> ids(int device) const;
  Stream* pooled(int device);
  Stream* create(int device);

  void issue(const Lock& lock, Stream* stream, const Task& task);
  void force(Lock& lock, Stream* stream, std::uint64_t position);
  void force_all(Lock& lock);
  bool is_idle() const;  // no task anywhere
  bool is_any_capturing() const;
  std::uint64_t num_pending(int device) const;

  // The clock's part of giving `stream` an operation.
  Access begin(const Lock& lock, Stream* stream, const char* what);
  Point record(const Lock& lock, Stream* stream);
  // `clock`, and what the points were behind.
  Clock joined(Clock clock, const std::vector<Point>& points) const;
  void wait(const Lock& lock, Stream* stream, const Point& point);
  // False, and one step nearer, where it has not passed, or is said not to have.
  bool query(Lock& lock, const Point& point);
  void synchronize(Lock& lock, const Point& point);
  bool has_passed(const Point& point) const { return point.stream == nullptr || point.stream->done >= point.position; }

  // Steps that nobody asked for. Called where the program calls the machine.
  void meddle(Lock& lock);
  void set_adversary(std::uint64_t seed, double eagerness, double reluctance, bool is_for_caller);

  // Runs everything and tells the host, and then forgets who did what: all of it is past.
  void settle(Lock& lock);

  // Simulated seconds: of a copy on the device's link, and of anything else.
  void take_link(const Lock& lock, Stream* stream, Direction direction, std::size_t bytes);
  void advance(const Lock&, Stream* stream, double seconds) {
    stream->time_s = now(stream) + seconds;
    kernels_time_s_ = std::max(kernels_time_s_, stream->time_s);
  }
  double host_time_s() const { return host_time_s_; }
  std::array<double, 2> link_bytes_per_s{};  // by direction; 0: no time
  double kernel_bytes_per_s = 0.0;           // of all that a kernel reads and writes; 0: no time

 private:
  friend class KernelScope;
  double now(const Stream* stream) const { return std::max(stream->time_s, host_time_s_); }
  void step(Lock& lock, Stream* stream);
  void move_on(Lock& lock, Stream* stream);
  void know(const Point& point);
  bool is_known(const Point& point) const;
  Stream* add(int device, std::int64_t id);

  std::vector<std::unique_ptr<Stream>> all_;
  std::array<int, kNumDevices> next_pooled_{};
  std::condition_variable changed_;
  Clock host_;
  double host_time_s_ = 0.0;
  double kernels_time_s_ = 0.0;  // when those that were given so far end
  std::array<std::array<double, 2>, kNumDevices> link_free_s_{};
  int num_queues_ = 0;
  std::uint64_t epoch_ = 0;
  Adversary adversary_;
};

Streams& streams();

// While it lives, this thread runs a kernel of `stream`; all that the stream was given before has run.
class KernelScope {
 public:
  explicit KernelScope(Stream* stream);
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;
  ~KernelScope() noexcept;

 private:
  Stream* const stream_;
};

// The device, and on each device the stream, that is current in this thread.
int current_device();
void set_current_device(int device);
Stream* current_stream(int device);
void set_current_stream(Stream* stream);

}  // namespace actckpt::sim_device
