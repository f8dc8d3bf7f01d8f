// The Python objects for a CPU engine's tickets, and the store of CPU tensors that the offload hooks call directly.
//
// Thread rule: GIL held; calls that wait release it. Ownership: tickets share the engine; a store's tickets are used
// while its Python object is alive.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "bind/engine.h"
#include "engine/cpu/cpu_engine.h"
#include "offload/store.h"

namespace actckpt::python {

using CpuEnginePtr = std::shared_ptr<CpuEngine>;

// Takes `keep`, which keeps the bytes alive and unchanged, and starts the write. Waits while the window is full; null
// instead unless `must`.
CpuTicketPtr put_bytes(CpuEngine& engine, const std::byte* source, std::size_t nbytes, const py::object& keep,
                       bool must);

// Destruction drops the ticket.
class CpuTicketHandle {
 public:
  CpuTicketHandle(CpuEnginePtr engine, CpuTicketPtr ticket) : engine_(std::move(engine)), ticket_(std::move(ticket)) {}
  CpuTicketHandle(const CpuTicketHandle&) = delete;
  CpuTicketHandle& operator=(const CpuTicketHandle&) = delete;
  ~CpuTicketHandle() { drop(); }

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

  const CpuEnginePtr engine_;
  const CpuTicketPtr ticket_;
};

// Offloads CPU tensors to an engine.
class CpuStore final : public Store {
 public:
  explicit CpuStore(CpuEnginePtr engine) : engine_(std::move(engine)) {}

  std::unique_ptr<StoreTicket> put(const Source& source, bool must) override;
  CpuEnginePtr engine() const { return engine_; }

  // Logs new failed writes; their tensors stayed.
  void check_writes();

 private:
  const CpuEnginePtr engine_;
  std::uint64_t num_told_ = 0;
};

}  // namespace actckpt::python
