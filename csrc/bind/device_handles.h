// The Python objects for an engine and its tickets.
//
// Contract: an engine without a registrar is one of host memory: it has no streams, and its `release` is None.
// `finish` passes whatever the engine releases to `release`, and then drops it; empty uses need no call. `release` is
// TorchStreams, or a callable `release(keep, uses)` with uses a list of (device, stream). What it raises is reported as
// unraisable: it runs in destructors too.
// Thread rule: GIL held unless a function says otherwise. `get` keeps it throughout, so that nobody can drop the
// reference that it returns before it is counted.
// Ownership: a handle owns backend, pool and engine; tickets share the handle.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bind/engine.h"
#include "bind/torch_streams.h"
#include "engine/memory/pool.h"
#include "engine/protocol/device_engine.h"
#include "engine/tiers/disk_tier.h"

namespace actckpt::python {

void bind_device(py::module_& module);

struct HandleSettings {
  std::string library;  // of the driver; empty: a driver object is used instead
  PoolConfig pool;
  std::uint64_t window_bytes = DeviceConfig().window_bytes;
  std::shared_ptr<SpillFile> file;  // null: no disk
  std::uint64_t bounce_bytes = 0;   // pinned for bounce buffers, in addition to the pool
  std::uint64_t buffer_bytes = SpillSettings().buffer_bytes;
  int num_workers = 2;  // 0: `work` runs their jobs
  ProtocolRules rules;
};

class DeviceHandle : public std::enable_shared_from_this<DeviceHandle> {
 public:
  // `registrar`: of the backend, which lives as long.
  DeviceHandle(std::shared_ptr<Backend> backend, SlabRegistrar* registrar, const HandleSettings& settings,
               py::object release, DeviceEngine::Pause pause = nullptr);
  ~DeviceHandle() noexcept;

  // No ticket: why the tensor stays. Releases the GIL: may pin memory, copy, or wait (`must`).
  Put put_bytes(std::uintptr_t ptr, std::uint64_t nbytes, Stream stream, const py::object& keep, bool must);
  // A DeviceTicket, or why the tensor stays.
  py::object put(std::uintptr_t ptr, std::uint64_t nbytes, int device, std::uintptr_t stream, const py::object& keep,
                 bool must);
  void poll();
  void make_room(int device, std::uintptr_t stream);
  void flush() { engine_->flush(); }
  std::uint64_t trim() { return pool_->trim(); }
  const std::string& library() const { return library_; }
  void limit_window(std::optional<std::uint64_t> bytes) { engine_->limit_window(bytes.value_or(kFollowsSizes)); }
  DeviceStats stats() { return engine_->stats(); }
  PoolStats pool_stats() { return pool_->stats(); }
  // How many threads the system granted, and why it granted fewer.
  std::pair<int, std::string> start_workers();

  // Runs queued worker jobs in this thread until there is none, without the GIL.
  void work();

  // No thread and no device call from now on; without the GIL.
  void close() noexcept;

  DeviceEngine* engine() { return engine_.get(); }
  void finish(const Releases& releases) noexcept;

 private:
  void tell_uses(py::handle keep, const Uses& uses);

  const std::string library_;
  const std::shared_ptr<Backend> backend_;
  const bool is_host_;
  std::shared_ptr<Pool> pool_;
  const std::shared_ptr<Workers> workers_;
  std::unique_ptr<DeviceEngine> engine_;
  const py::object release_;
  TorchStreams* const streams_;  // `release_`; null if it is another callable
};

class DeviceTicketHandle {
 public:
  DeviceTicketHandle(std::shared_ptr<DeviceHandle> owner, DeviceTicketPtr ticket)
      : owner_(std::move(owner)), ticket_(std::move(ticket)) {}
  DeviceTicketHandle(const DeviceTicketHandle&) = delete;
  DeviceTicketHandle& operator=(const DeviceTicketHandle&) = delete;
  ~DeviceTicketHandle() { drop(); }

  std::uint64_t nbytes() const { return ticket_->bytes; }
  const char* tier() const;
  std::pair<int, std::uintptr_t> put_stream() const { return {ticket_->put_stream.device, ticket_->put_stream.handle}; }
  bool use(int device, std::uintptr_t stream);

  // No object: allocate on the stream and `load(..., urgent=True)`. Releases the GIL while a worker has to load the
  // bytes first.
  struct Found {
    py::object object;
    bool record_stream = false;
  };
  Found find(Stream stream);
  // (object, record_stream wanted), or None.
  py::object get(int device, std::uintptr_t stream);
  bool load(int device, std::uintptr_t stream, std::uintptr_t ptr, const py::object& keep, bool urgent);
  void unload();
  void drop();

 private:
  const std::shared_ptr<DeviceHandle> owner_;
  const DeviceTicketPtr ticket_;
};

}  // namespace actckpt::python
