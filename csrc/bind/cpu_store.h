// The Python objects for a host engine's tickets, and the store of CPU tensors that the offload hooks call directly.
//
// Thread rule: GIL held; calls that wait release it. Ownership: tickets share the engine; a store's tickets are used
// while its Python object is alive.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "bind/engine.h"
#include "engine/host/host_engine.h"
#include "offload/store.h"

namespace actckpt::python {

using EnginePtr = std::shared_ptr<HostEngine>;

// Takes `keep`, which keeps the bytes alive and unchanged, and queues the write. Waits while the window is full; null
// instead unless `must`.
TicketPtr put_bytes(HostEngine& engine, const std::byte* source, std::size_t nbytes,
                    const std::shared_ptr<ByteStore>& tier, const py::object& keep, bool must);

// Destruction drops the ticket.
class TicketHandle {
 public:
  TicketHandle(EnginePtr engine, TicketPtr ticket) : engine_(std::move(engine)), ticket_(std::move(ticket)) {}
  TicketHandle(const TicketHandle&) = delete;
  TicketHandle& operator=(const TicketHandle&) = delete;
  ~TicketHandle() { drop(); }

  std::size_t nbytes() const { return ticket_->bytes; }

  // Keeps the GIL if the answer is known, else releases it and waits. None: `load` must read the bytes.
  py::object get();
  // Keeps the GIL: queues.
  bool prefetch(std::uintptr_t ptr, const py::object& keep);
  // Releases the GIL: reads.
  py::object load(std::uintptr_t ptr, const py::object& keep);
  // Keep the GIL: a leaf lock.
  void unload();
  void drop();

 private:
  py::object look(bool* busy);

  const EnginePtr engine_;
  const TicketPtr ticket_;
};

// Offloads CPU tensors to one tier of an engine.
class CpuStore final : public Store {
 public:
  CpuStore(EnginePtr engine, std::shared_ptr<ByteStore> tier) : engine_(std::move(engine)), tier_(std::move(tier)) {}

  std::unique_ptr<StoreTicket> put(const Source& source, bool must) override;
  EnginePtr engine() const { return engine_; }
  std::shared_ptr<ByteStore> tier() const { return tier_; }

  // Logs new failed writes; their tensors stayed.
  void check_writes();

 private:
  const EnginePtr engine_;
  const std::shared_ptr<ByteStore> tier_;
  std::uint64_t num_told_ = 0;
};

}  // namespace actckpt::python
