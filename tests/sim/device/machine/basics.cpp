#include "sim/device/machine/basics.h"

#include <chrono>
#include <set>
#include <thread>
#include <utility>

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {
namespace {

constexpr std::size_t kMaxSaid = 20;
constexpr int kMaxTries = 5000;  // milliseconds

std::mutex& machine_mutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

}  // namespace

Lock lock_machine() { return Lock(machine_mutex()); }

Lock try_lock_machine() {
  Lock lock(machine_mutex(), std::try_to_lock);
  for (int i = 0; i < kMaxTries && !lock.owns_lock(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock = Lock(machine_mutex(), std::try_to_lock);
  }
  return lock;
}

void Faults::add(std::string what) {
  if (said_.size() < kMaxSaid) {
    said_.push_back(std::move(what));
  } else {
    ++num_unsaid_;
  }
}

std::vector<std::string> Faults::take() {
  std::vector<std::string> all = std::exchange(said_, {});
  if (num_unsaid_ > 0) {
    all.push_back("and " + std::to_string(std::exchange(num_unsaid_, 0)) + " more");
  }
  return all;
}

Faults& faults() {
  static auto* const all = new Faults();
  return *all;
}

std::string described(const Access& access) {
  if (access.stream == nullptr) {
    return access.what;
  }
  return std::string(access.what) + " on sim:" + std::to_string(access.stream->device) + ", stream " +
         std::to_string(access.stream->id);
}

const char* interned(const std::string& name) {
  static auto* const names = new std::set<std::string>();
  return names->insert(name).first->c_str();
}

}  // namespace actckpt::sim_device
