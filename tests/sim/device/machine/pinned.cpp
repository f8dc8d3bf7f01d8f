#include "sim/device/machine/pinned.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "sim/device/machine/checker.h"

namespace actckpt::sim_device {

constexpr std::uintptr_t kPage = 4096;

namespace {

struct sigaction previous_handler;

Range pages_of(const Range& range) { return {range.begin / kPage * kPage, (range.end + kPage - 1) / kPage * kPage}; }

void set_access(const Range& pages, int access) {
  if (pages.begin < pages.end) {
    mprotect(reinterpret_cast<void*>(pages.begin), pages.bytes(), access);
  }
}

}  // namespace

// Whether the host's access at `address` was stopped by our protection, which is gone now.
bool may_go_on(std::uintptr_t address) {
  const Lock lock = try_lock_machine();
  PinnedMemory& memory = pinned_memory();
  if (!lock.owns_lock() || !memory.contains({address, address + 1})) {
    return false;
  }
  const Range page = pages_of({address, address + 1});
  auto& uses = memory.uses_;
  const auto stopped = std::stable_partition(
      uses.begin(), uses.end(), [&](const PinnedMemory::Use& use) { return !pages_of(use.range).overlaps(page); });
  const std::vector<PinnedMemory::Use> past(stopped, uses.end());
  uses.erase(stopped, uses.end());
  for (const PinnedMemory::Use& use : past) {
    if (use.range.contains({address, address + 1})) {  // else a neighbour in its page
      faults().add(std::string("the host touches pinned memory that ") + described(use.access) +
                   (use.writes ? " writes" : " reads") + ", and does not know that it has ended");
    }
    memory.protect(use.range);
  }
  memory.protect(page);
  return true;
}

namespace {

void on_touch(int signal, siginfo_t* info, void* context) {
  if (may_go_on(reinterpret_cast<std::uintptr_t>(info->si_addr))) {
    return;
  }
  if ((previous_handler.sa_flags & SA_SIGINFO) != 0) {
    previous_handler.sa_sigaction(signal, info, context);
  } else if (previous_handler.sa_handler != SIG_DFL && previous_handler.sa_handler != SIG_IGN) {
    previous_handler.sa_handler(signal);
  } else {
    sigaction(signal, &previous_handler, nullptr);  // and again
  }
}

void watch_touches() {
  static const bool is_watching = [] {
    struct sigaction own{};
    own.sa_sigaction = &on_touch;
    own.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    return sigaction(SIGSEGV, &own, &previous_handler) == 0;
  }();
  static_cast<void>(is_watching);
}

}  // namespace

PinnedMemory& pinned_memory() {
  static auto* const memory = new PinnedMemory();
  return *memory;
}

void* PinnedMemory::allocate(Lock& lock, std::size_t bytes) {
  unmap_passed(lock);
  const std::size_t whole = pages_of({0, bytes}).bytes();
  void* const data = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return nullptr;
  }
  all_.emplace(range_of(data, whole).begin, Pinned{range_of(data, whole).end, false, {}});
  return data;
}

void PinnedMemory::free(Lock& lock, void* data) {
  const auto found = all_.find(range_of(data, 0).begin);
  Leaving leaving{{found->first, found->second.end}, std::move(found->second.fences)};
  const Clock clock = streams().joined(Clock(), leaving.fences);
  uses_.erase(std::remove_if(uses_.begin(), uses_.end(),
                             [&](const Use& use) {
                               return use.range.overlaps(leaving.range) &&
                                      clock.covers(use.access.queue, use.access.tick);
                             }),
              uses_.end());
  end_uses(leaving.range, "is freed");
  all_.erase(found);
  leaving_.push_back(std::move(leaving));
  unmap_passed(lock);
}

void PinnedMemory::record_use(const Lock& lock, const void* data, Stream* stream) {
  const auto next = all_.upper_bound(range_of(data, 0).begin);
  if (next != all_.begin()) {
    std::prev(next)->second.fences.push_back(streams().record(lock, stream));
  }
}

// Memory whose uses have passed goes back; also not while a copy of a wrong program may still name it.
void PinnedMemory::unmap_passed(const Lock&) {
  const auto is_past = [](const Leaving& leaving) {
    return std::all_of(leaving.fences.begin(), leaving.fences.end(),
                       [](const Point& fence) { return streams().has_passed(fence); });
  };
  if (!streams().is_idle()) {
    return;
  }
  for (auto it = leaving_.begin(); it != leaving_.end();) {
    if (is_past(*it)) {
      checker().forget(it->range);
      munmap(reinterpret_cast<void*>(it->range.begin), it->range.bytes());
      it = leaving_.erase(it);
    } else {
      ++it;
    }
  }
}

bool PinnedMemory::add(const Lock&, const Range& range) {
  const auto next = all_.lower_bound(range.begin);
  if ((next != all_.end() && next->first < range.end) ||
      (next != all_.begin() && std::prev(next)->second.end > range.begin)) {
    return false;
  }
  all_.emplace(range.begin, Pinned{range.end, true, {}});
  return true;
}

bool PinnedMemory::remove(Lock& lock, const void* data) {
  const auto found = all_.find(range_of(data, 0).begin);
  if (found == all_.end() || !found->second.is_registered) {
    return false;
  }
  const Range range{found->first, found->second.end};
  end_uses(range, "is unregistered");
  all_.erase(found);
  streams().force_all(lock);  // the memory may be gone after this
  checker().forget(range);
  return true;
}

bool PinnedMemory::contains(const Range& range) const {
  const auto next = all_.upper_bound(range.begin);
  return next != all_.begin() && range.end <= std::prev(next)->second.end;
}

std::uint64_t PinnedMemory::num_registered_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [begin, pinned] : all_) {
    sum += pinned.is_registered ? pinned.end - begin : 0;
  }
  return sum;
}

void PinnedMemory::begin_use(const Range& range, const Access& access, bool writes) {
  watch_touches();
  uses_.push_back({range, access, writes});
  protect(range);
}

void PinnedMemory::host_knows(const Clock& host) {
  const auto known = std::stable_partition(
      uses_.begin(), uses_.end(), [&](const Use& use) { return !host.covers(use.access.queue, use.access.tick); });
  const std::vector<Use> past(known, uses_.end());
  uses_.erase(known, uses_.end());
  for (const Use& use : past) {
    protect(use.range);
  }
}

// The owner lets go of the memory: no use that the host does not know to be past may be left.
void PinnedMemory::end_uses(const Range& range, const char* what) {
  for (const Use& use : uses_) {
    if (use.range.overlaps(range)) {
      faults().add(std::string("pinned memory ") + what + " that " + described(use.access) +
                   (use.writes ? " writes" : " reads") + ", and the host does not know that it has ended");
    }
  }
  uses_.erase(std::remove_if(uses_.begin(), uses_.end(), [&](const Use& use) { return use.range.overlaps(range); }),
              uses_.end());
  protect(range);
}

// The pages that the range touches and that are pinned as a whole.
Range PinnedMemory::guarded(const Range& range) const {
  const auto next = all_.upper_bound(range.begin);
  if (next == all_.begin()) {
    return {};
  }
  const auto& [begin, pinned] = *std::prev(next);
  const Range pages = pages_of(range);
  return {std::max(pages.begin, (begin + kPage - 1) / kPage * kPage), std::min(pages.end, pinned.end / kPage * kPage)};
}

// What the uses that are left allow the host.
void PinnedMemory::protect(const Range& range) const {
  const Range pages = guarded(range);
  set_access(pages, PROT_READ | PROT_WRITE);
  for (const bool writes : {false, true}) {
    for (const Use& use : uses_) {
      const Range used = guarded(use.range);
      if (use.writes == writes && used.overlaps(pages)) {
        set_access({std::max(used.begin, pages.begin), std::min(used.end, pages.end)}, writes ? PROT_NONE : PROT_READ);
      }
    }
  }
}

OpenedPages::OpenedPages(const Range& first, const Range& second) : first_(first), second_(second) {
  for (const Range& range : {first, second}) {
    if (pinned_memory().contains(range)) {
      set_access(pinned_memory().guarded(range), PROT_READ | PROT_WRITE);
    }
  }
}

OpenedPages::~OpenedPages() noexcept {
  for (const Range& range : {first_, second_}) {
    if (pinned_memory().contains(range)) {
      pinned_memory().protect(range);
    }
  }
}

}  // namespace actckpt::sim_device
