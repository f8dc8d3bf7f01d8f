// Binds the engine of CPU tensors, its tickets and its store. Each function documents whether it releases the GIL.

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bind/cpu_store.h"
#include "bind/engine.h"
#include "engine/cpu/cpu_engine.h"
#include "engine/errors.h"
#include "engine/protocol/device_engine.h"

namespace actckpt::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Engines to shut down at exit. Guarded by the GIL; leaked, since modules may outlive statics.
std::vector<std::weak_ptr<CpuEngine>>& engines() {
  static auto* const all = new std::vector<std::weak_ptr<CpuEngine>>();
  return *all;
}

// A ticket, or why the tensor stays.
py::object put(const CpuEnginePtr& engine, std::uintptr_t ptr, std::size_t nbytes, const py::object& keep, bool must) {
  CpuTicketPtr ticket = put_bytes(*engine, to_pointer(ptr), nbytes, keep, must);
  return ticket == nullptr ? py::cast(PutOutcome::kKeptBusy)
                           : py::cast(std::make_unique<CpuTicketHandle>(engine, std::move(ticket)));
}

std::vector<CpuEnginePtr> live_engines() {
  std::vector<CpuEnginePtr> alive;
  for (const auto& engine : engines()) {
    if (CpuEnginePtr locked = engine.lock()) {
      alive.push_back(std::move(locked));
    }
  }
  return alive;
}

void collect(CpuEngine& engine) {
  Released released;
  engine.collect(&released);
  drop_references(released);
}

// The interpreter calls this in its main thread, with the GIL. It frees written sources also if the program never calls
// the engine again.
int collect_all(void*) {
  for (const CpuEnginePtr& engine : live_engines()) {
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
  const std::vector<CpuEnginePtr> alive = live_engines();
  engines().clear();
  const py::gil_scoped_release no_gil;
  for (const CpuEnginePtr& engine : alive) {
    engine->shutdown();
  }
}

CpuEnginePtr make_engine(std::shared_ptr<SpillFile> file, int num_workers, std::optional<std::uint64_t> window_bytes) {
  if (num_workers < 0) {
    throw py::value_error("num_workers must not be negative, got " + std::to_string(num_workers));
  }
  const CpuConfig config{num_workers, window_bytes.value_or(kFollowsSizes), &tell_released};
  CpuEnginePtr engine = CpuEngine::make(std::move(file), config);
  auto& all = engines();
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& old) { return old.expired(); }), all.end());
  all.push_back(engine);
  return engine;
}

void bind_cpu_stats(py::module_& module) {
  py::class_<CpuStats>(module, "CpuStats")
      .def_readonly("num_puts", &CpuStats::num_puts)
      .def_readonly("written_bytes", &CpuStats::written_bytes)
      .def_readonly("loaded_bytes", &CpuStats::loaded_bytes)
      .def_readonly("stored_bytes", &CpuStats::stored_bytes)
      .def_readonly("peak_stored_bytes", &CpuStats::peak_stored_bytes)
      .def_readonly("inflight_bytes", &CpuStats::inflight_bytes)
      .def_readonly("peak_inflight_bytes", &CpuStats::peak_inflight_bytes)
      .def_readonly("graveyard_bytes", &CpuStats::graveyard_bytes)
      .def_readonly("num_live", &CpuStats::num_live)
      .def_readonly("window_bytes", &CpuStats::window_bytes)
      .def_readonly("num_queued", &CpuStats::num_queued)
      .def_readonly("num_revived", &CpuStats::num_revived)
      .def_readonly("num_prefetched", &CpuStats::num_prefetched)
      .def_readonly("num_late", &CpuStats::num_late)
      .def_readonly("num_failed_writes", &CpuStats::num_failed_writes)
      .def_readonly("num_full_writes", &CpuStats::num_full_writes)
      .def_readonly("num_gone_sources", &CpuStats::num_gone_sources)
      .def_readonly("num_kept_busy", &CpuStats::num_kept_busy)
      .def_readonly("kept_bytes", &CpuStats::kept_bytes)
      .def_readonly("stall_seconds", &CpuStats::stall_seconds)
      .def_readonly("last_error", &CpuStats::last_error);
}

void bind_cpu_ticket(py::module_& module) {
  py::class_<CpuTicketHandle>(module, "CpuTicket")
      .def("get", &CpuTicketHandle::get)
      .def("prefetch", &CpuTicketHandle::prefetch, py::arg("ptr"), py::arg("keep"))
      .def("load", &CpuTicketHandle::load, py::arg("ptr"), py::arg("keep"))
      .def("unload", &CpuTicketHandle::unload)
      .def("drop", &CpuTicketHandle::drop)
      .def_property_readonly("nbytes", &CpuTicketHandle::nbytes);
}

void bind_cpu_engine(py::module_& module) {
  py::class_<CpuEngine, CpuEnginePtr>(module, "CpuEngine")
      .def(py::init(&make_engine), py::arg("file"), py::kw_only(), py::arg("num_workers") = CpuConfig().num_workers,
           py::arg("window_bytes") = CpuConfig().window_bytes)
      // Keeps the GIL; releases it while the window is full.
      .def("put", &put, py::arg("ptr"), py::arg("nbytes"), py::arg("keep"), py::kw_only(), py::arg("must") = true)
      // Keeps the GIL: a leaf lock.
      .def("poll", &collect)
      // Keeps the GIL: a leaf lock.
      .def(
          "limit_window",
          [](CpuEngine& self, std::optional<std::uint64_t> bytes) { self.limit_window(bytes.value_or(kFollowsSizes)); },
          py::arg("nbytes"))
      // Keeps the GIL: makes threads. Their number, and why it is less than asked for.
      .def("start_workers",
           [](CpuEngine& self) {
             std::string why;
             const int num_granted = self.start_workers(&why);
             return py::make_tuple(num_granted, why);
           })
      // Keeps the GIL: no lock.
      .def_property_readonly("num_failed_writes", &CpuEngine::num_failed_writes)
      // Release the GIL: wait. The first one waits until pending writes fit the window.
      .def(
          "make_room", [](CpuEngine& self) { self.make_room(0); }, NoGil())
      .def("flush", &CpuEngine::flush, NoGil())
      .def("shutdown", &CpuEngine::shutdown, NoGil())
      .def("stats", &CpuEngine::stats, NoGil());
}

}  // namespace

void bind_cpu(py::module_& module) {
  bind_cpu_stats(module);
  bind_cpu_ticket(module);
  bind_cpu_engine(module);

  py::class_<CpuStore, Store, std::shared_ptr<CpuStore>>(module, "CpuStore")
      .def(py::init<CpuEnginePtr>(), py::arg("engine"))
      .def_property_readonly("engine", &CpuStore::engine);

  py::module_::import("atexit").attr("register")(py::cpp_function(&shut_down_all));
}

}  // namespace actckpt::python
