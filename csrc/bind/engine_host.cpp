// Binds the host engine of CPU tensors, its tickets and its stores. Each function documents whether it releases the
// GIL.

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bind/cpu_store.h"
#include "bind/engine.h"
#include "engine/errors.h"
#include "engine/host/host_engine.h"
#include "engine/protocol/device_engine.h"

namespace actckpt::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Engines to shut down at exit. Guarded by the GIL; leaked, since modules may outlive statics.
std::vector<std::weak_ptr<HostEngine>>& engines() {
  static auto* const all = new std::vector<std::weak_ptr<HostEngine>>();
  return *all;
}

// A ticket, or why the tensor stays.
py::object put(const EnginePtr& engine, std::uintptr_t ptr, std::size_t nbytes, const std::shared_ptr<ByteStore>& tier,
               const py::object& keep, bool must) {
  TicketPtr ticket = put_bytes(*engine, to_pointer(ptr), nbytes, tier, keep, must);
  return ticket == nullptr ? py::cast(PutOutcome::kKeptBusy)
                           : py::cast(std::make_unique<TicketHandle>(engine, std::move(ticket)));
}

std::vector<EnginePtr> live_engines() {
  std::vector<EnginePtr> alive;
  for (const auto& engine : engines()) {
    if (EnginePtr locked = engine.lock()) {
      alive.push_back(std::move(locked));
    }
  }
  return alive;
}

void collect(HostEngine& engine) {
  Released released;
  engine.collect(&released);
  drop_references(released);
}

// Called by the interpreter in its main thread, with the GIL: written sources are freed even if nobody calls the engine
// again.
int collect_all(void*) {
  for (const EnginePtr& engine : live_engines()) {
    try {
      collect(*engine);
    } catch (const ForkedError&) {  // a parent's engine: the memory belongs to the parent
    }
  }
  return 0;
}

// Needs no GIL. False if too many calls are pending: the next finished copy tries again.
bool tell_released() { return Py_AddPendingCall(&collect_all, nullptr) == 0; }

void shut_down_all() {
  const std::vector<EnginePtr> alive = live_engines();
  engines().clear();
  const py::gil_scoped_release no_gil;
  for (const EnginePtr& engine : alive) {
    engine->shutdown();
  }
}

EnginePtr make_engine(int num_workers, std::optional<std::uint64_t> window_bytes) {
  if (num_workers < 0) {
    throw py::value_error("num_workers must not be negative, got " + std::to_string(num_workers));
  }
  EnginePtr engine = HostEngine::make(HostConfig{num_workers, window_bytes.value_or(kFollowsSizes), &tell_released});
  auto& all = engines();
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& old) { return old.expired(); }), all.end());
  all.push_back(engine);
  return engine;
}

void bind_host_stats(py::module_& module) {
  py::class_<HostStats>(module, "HostStats")
      .def_readonly("num_puts", &HostStats::num_puts)
      .def_readonly("written_bytes", &HostStats::written_bytes)
      .def_readonly("loaded_bytes", &HostStats::loaded_bytes)
      .def_readonly("stored_bytes", &HostStats::stored_bytes)
      .def_readonly("peak_stored_bytes", &HostStats::peak_stored_bytes)
      .def_readonly("inflight_bytes", &HostStats::inflight_bytes)
      .def_readonly("peak_inflight_bytes", &HostStats::peak_inflight_bytes)
      .def_readonly("graveyard_bytes", &HostStats::graveyard_bytes)
      .def_readonly("num_live", &HostStats::num_live)
      .def_readonly("window_bytes", &HostStats::window_bytes)
      .def_readonly("num_queued", &HostStats::num_queued)
      .def_readonly("num_revived", &HostStats::num_revived)
      .def_readonly("num_prefetched", &HostStats::num_prefetched)
      .def_readonly("num_late", &HostStats::num_late)
      .def_readonly("num_failed_writes", &HostStats::num_failed_writes)
      .def_readonly("num_full_writes", &HostStats::num_full_writes)
      .def_readonly("num_gone_sources", &HostStats::num_gone_sources)
      .def_readonly("num_kept_busy", &HostStats::num_kept_busy)
      .def_readonly("kept_bytes", &HostStats::kept_bytes)
      .def_readonly("stall_seconds", &HostStats::stall_seconds)
      .def_readonly("num_workers", &HostStats::num_workers)
      .def_readonly("last_error", &HostStats::last_error);
}

void bind_byte_stores(py::module_& module) {
  py::class_<ByteStore, std::shared_ptr<ByteStore>>(module, "ByteStore")
      .def_static("in_pool",
                  [](std::shared_ptr<Pool> pool) -> std::shared_ptr<ByteStore> {
                    return std::make_shared<PoolStore>(std::move(pool));
                  })
      .def_static("on_disk", [](std::shared_ptr<SpillFile> file) -> std::shared_ptr<ByteStore> {
        return std::make_shared<DiskStore>(std::move(file));
      });
}

void bind_ticket(py::module_& module) {
  py::class_<TicketHandle>(module, "Ticket")
      .def("get", &TicketHandle::get)
      .def("prefetch", &TicketHandle::prefetch, py::arg("ptr"), py::arg("keep"))
      .def("load", &TicketHandle::load, py::arg("ptr"), py::arg("keep"))
      .def("unload", &TicketHandle::unload)
      .def("drop", &TicketHandle::drop)
      .def_property_readonly("nbytes", &TicketHandle::nbytes);
}

void bind_host_engine(py::module_& module) {
  py::class_<HostEngine, EnginePtr>(module, "HostEngine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("num_workers") = HostConfig().num_workers,
           py::arg("window_bytes") = HostConfig().window_bytes)
      // Keeps the GIL; releases it while the window is full.
      .def("put", &put, py::arg("ptr"), py::arg("nbytes"), py::arg("tier"), py::arg("keep"), py::kw_only(),
           py::arg("must") = true)
      // Keeps the GIL: a leaf lock.
      .def("poll", &collect)
      // Keeps the GIL: a leaf lock.
      .def(
          "limit_window",
          [](HostEngine& self, std::optional<std::uint64_t> bytes) {
            self.limit_window(bytes.value_or(kFollowsSizes));
          },
          py::arg("nbytes"))
      // Keeps the GIL: no lock.
      .def_property_readonly("num_failed_writes", &HostEngine::num_failed_writes)
      // Release the GIL: wait. The first one waits until pending writes fit the window.
      .def(
          "make_room", [](HostEngine& self) { self.make_room(0); }, NoGil())
      .def("flush", &HostEngine::flush, NoGil())
      .def("shutdown", &HostEngine::shutdown, NoGil())
      .def("stats", &HostEngine::stats, NoGil());
}

}  // namespace

void bind_host(py::module_& module) {
  bind_host_stats(module);
  bind_byte_stores(module);
  bind_ticket(module);
  bind_host_engine(module);

  py::class_<CpuStore, Store, std::shared_ptr<CpuStore>>(module, "CpuStore")
      .def(py::init<EnginePtr, std::shared_ptr<ByteStore>>(), py::arg("engine"), py::arg("tier"))
      .def_property_readonly("engine", &CpuStore::engine)
      .def_property_readonly("tier", &CpuStore::tier);

  py::module_::import("atexit").attr("register")(py::cpp_function(&shut_down_all));
}

}  // namespace actckpt::python
