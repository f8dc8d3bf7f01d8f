// Binds the engine of device tensors, its tickets and its statistics. Each function documents whether it releases the
// GIL.

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/device_handles.h"
#include "bind/engine.h"
#include "bind/given.h"
#include "engine/cuda/cuda_backend.h"
#include "engine/errors.h"
#include "engine/memory/extents.h"
#include "engine/protocol/device_engine.h"
#include "engine/protocol/host_backend.h"

namespace actckpt::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Engines to close at exit. Guarded by the GIL; leaked, since modules may outlive statics.
std::vector<std::weak_ptr<DeviceHandle>>& handles() {
  static auto* const all = new std::vector<std::weak_ptr<DeviceHandle>>();
  return *all;
}

void close_all() {
  std::vector<std::shared_ptr<DeviceHandle>> alive;
  for (const auto& weak : handles()) {
    if (auto handle = weak.lock()) {
      alive.push_back(std::move(handle));
    }
  }
  handles().clear();
  const py::gil_scoped_release no_gil;
  for (const auto& handle : alive) {
    handle->close();
  }
}

// Opened once each. Guarded by the GIL; never freed, like the libraries.
const cuda::OpenedDriver& opened_driver(const std::string& library) {
  static auto* const all = new std::map<std::string, cuda::OpenedDriver>();
  const auto found = all->find(library);
  return found != all->end() ? found->second : all->emplace(library, cuda::open_driver(library.c_str())).first->second;
}

std::shared_ptr<cuda::CudaBackend> backend_over(const std::string& library) {
  const cuda::OpenedDriver& opened = opened_driver(library);
  if (opened.driver == nullptr) {
    throw DeviceError("tensors of devices cannot be moved: " + opened.why + ".");
  }
  try {
    return std::make_shared<cuda::CudaBackend>(opened.driver);
  } catch (const DeviceError& error) {
    throw DeviceError("tensors of devices cannot be moved with the driver " + library + ": " + error.what());
  }
}

// When the engine waits, the given device runs first, and then the workers' jobs, in this thread.
std::shared_ptr<DeviceHandle> make_over(const GivenDriver& driver, HandleSettings settings, const py::object& release) {
  settings.rules = driver.rules;
  const std::shared_ptr<cuda::CudaBackend> backend(new cuda::CudaBackend(driver.table),
                                                   [driver](cuda::CudaBackend* ended) { delete ended; });
  const auto weak = std::make_shared<std::weak_ptr<DeviceHandle>>();
  auto handle = std::make_shared<DeviceHandle>(backend, backend.get(), settings, release,
                                               [weak, advance = driver.advance](DeviceEngine::Lock& lock) {
                                                 advance();
                                                 if (const auto waiting = weak->lock()) {
                                                   lock.unlock();
                                                   waiting->work();
                                                   lock.lock();
                                                 }
                                               });
  *weak = handle;
  return handle;
}

std::uint64_t checked_buffer(std::uint64_t bytes) {
  if (bytes == 0 || bytes % kGranule != 0) {
    throw py::value_error("buffer_bytes must be a multiple of " + std::to_string(kGranule) + ", got " +
                          std::to_string(bytes));
  }
  return bytes;
}

std::shared_ptr<DeviceHandle> registered(std::shared_ptr<DeviceHandle> handle) {
  auto& all = handles();
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& old) { return old.expired(); }), all.end());
  all.push_back(handle);
  return handle;
}

std::shared_ptr<DeviceHandle> open_cuda(std::uint64_t limit_bytes, std::optional<std::uint64_t> window_bytes,
                                        const py::object& release, const std::string& library,
                                        std::shared_ptr<SpillFile> file, std::uint64_t bounce_bytes,
                                        std::uint64_t buffer_bytes, int num_workers, const py::object& driver) {
  if (library.empty() == driver.is_none()) {
    throw py::value_error("name the driver's library, or give a driver in its place");
  }
  if (num_workers < 1 && driver.is_none()) {
    throw py::value_error("num_workers must be at least 1, got " + std::to_string(num_workers));
  }
  HandleSettings settings;
  settings.library = library;
  settings.pool.limit_bytes = limit_bytes;
  settings.window_bytes = window_bytes.value_or(kFollowsSizes);
  settings.file = std::move(file);
  settings.bounce_bytes = bounce_bytes;
  settings.buffer_bytes = checked_buffer(buffer_bytes);
  settings.num_workers = num_workers;
  if (!driver.is_none()) {
    return registered(make_over(given<GivenDriver>(driver, kDriverCapsule), settings, release));
  }
  const std::shared_ptr<cuda::CudaBackend> backend = backend_over(library);
  return registered(std::make_shared<DeviceHandle>(backend, backend.get(), settings, release));
}

std::shared_ptr<DeviceHandle> open_host(std::shared_ptr<SpillFile> file, std::optional<std::uint64_t> window_bytes,
                                        std::uint64_t bounce_bytes, std::uint64_t buffer_bytes, int num_workers) {
  if (num_workers < 0) {
    throw py::value_error("num_workers must not be negative, got " + std::to_string(num_workers));
  }
  HandleSettings settings;
  settings.pool.limit_bytes = 0;
  settings.window_bytes = window_bytes.value_or(kFollowsSizes);
  settings.file = std::move(file);
  settings.bounce_bytes = bounce_bytes;
  settings.buffer_bytes = checked_buffer(buffer_bytes);
  settings.num_workers = num_workers;
  return registered(std::make_shared<DeviceHandle>(std::make_shared<HostBackend>(), nullptr, settings, py::none()));
}

void bind_kept(py::module_& module) {
  py::enum_<PutOutcome>(module, "Kept")
      .value("CAPTURING", PutOutcome::kKeptCapturing)
      .value("FULL", PutOutcome::kKeptFull)
      .value("BUSY", PutOutcome::kKeptBusy)
      .value("BEHIND", PutOutcome::kKeptBehind)
      .value("FAILED", PutOutcome::kKeptFailed)
      .value("STRANDED", PutOutcome::kKeptStranded);
}

void bind_device_stats(py::module_& module) {
  py::class_<DeviceStats>(module, "DeviceStats")
      .def_readonly("num_puts", &DeviceStats::num_puts)
      .def_readonly("offloaded_bytes", &DeviceStats::offloaded_bytes)
      .def_readonly("reloaded_bytes", &DeviceStats::reloaded_bytes)
      .def_readonly("inflight_bytes", &DeviceStats::inflight_bytes)
      .def_readonly("peak_inflight_bytes", &DeviceStats::peak_inflight_bytes)
      .def_readonly("graveyard_bytes", &DeviceStats::graveyard_bytes)
      .def_readonly("stranded_bytes", &DeviceStats::stranded_bytes)
      .def_readonly("num_live", &DeviceStats::num_live)
      .def_readonly("window_bytes", &DeviceStats::window_bytes)
      .def_readonly("num_revived", &DeviceStats::num_revived)
      .def_readonly("num_early_releases", &DeviceStats::num_early_releases)
      .def_readonly("num_kept_full", &DeviceStats::num_kept_full)
      .def_readonly("num_kept_busy", &DeviceStats::num_kept_busy)
      .def_readonly("num_kept_behind", &DeviceStats::num_kept_behind)
      .def_readonly("peak_disk_bytes", &DeviceStats::peak_tier_bytes)
      .def_readonly("bounce_bytes", &DeviceStats::bounce_bytes)
      .def_readonly("num_prefetched", &DeviceStats::num_prefetched)
      .def_readonly("num_late", &DeviceStats::num_late)
      .def_readonly("stall_seconds", &DeviceStats::stall_seconds)
      .def_readonly("num_host_waits", &DeviceStats::num_host_waits)
      .def_readonly("host_wait_seconds", &DeviceStats::host_wait_seconds)
      .def_readonly("num_disk_puts", &DeviceStats::num_tier_puts)
      .def_readonly("disk_bytes", &DeviceStats::tier_bytes)
      .def_property_readonly("num_failed_writes", [](const DeviceStats& self) { return self.spill.num_failed_drains; })
      .def_property_readonly("num_full_writes", [](const DeviceStats& self) { return self.spill.num_full_drains; })
      .def_property_readonly("num_failed_reads", [](const DeviceStats& self) { return self.spill.num_failed_fills; })
      .def_property_readonly("stuck_bytes", [](const DeviceStats& self) { return self.spill.stuck_bytes; })
      .def_property_readonly("spill_error", [](const DeviceStats& self) { return self.spill.last_error; })
      .def_readonly("num_kept_capturing", &DeviceStats::num_kept_capturing)
      .def_readonly("num_kept_failed", &DeviceStats::num_kept_failed)
      .def_readonly("last_error", &DeviceStats::last_error);
}

}  // namespace

void bind_device(py::module_& module) {
  bind_kept(module);
  bind_device_stats(module);
  py::class_<DeviceTicketHandle>(module, "DeviceTicket")
      .def("use", &DeviceTicketHandle::use, py::arg("device"), py::arg("stream"))
      .def("get", &DeviceTicketHandle::get, py::arg("device"), py::arg("stream"))
      .def("load", &DeviceTicketHandle::load, py::arg("device"), py::arg("stream"), py::arg("ptr"), py::arg("keep"),
           py::kw_only(), py::arg("urgent"))
      .def("unload", &DeviceTicketHandle::unload)
      .def("drop", &DeviceTicketHandle::drop)
      .def_property_readonly("nbytes", &DeviceTicketHandle::nbytes)
      .def_property_readonly("tier", &DeviceTicketHandle::tier)
      .def_property_readonly("put_stream", &DeviceTicketHandle::put_stream);

  py::class_<DeviceHandle, std::shared_ptr<DeviceHandle>>(module, "DeviceEngine")
      .def_static("cuda", &open_cuda, py::kw_only(), py::arg("limit_bytes"), py::arg("window_bytes"),
                  py::arg("release"), py::arg("library") = "", py::arg("spill_file") = nullptr,
                  py::arg("bounce_bytes") = 0, py::arg("buffer_bytes") = SpillSettings().buffer_bytes,
                  py::arg("num_workers") = 2, py::arg("driver") = py::none())
      .def_static("host", &open_host, py::kw_only(), py::arg("spill_file"), py::arg("window_bytes"),
                  py::arg("bounce_bytes"), py::arg("buffer_bytes") = SpillSettings().buffer_bytes,
                  py::arg("num_workers") = 2)
      .def("put", &DeviceHandle::put, py::arg("ptr"), py::arg("nbytes"), py::arg("device"), py::arg("stream"),
           py::arg("keep"), py::kw_only(), py::arg("must") = true)
      .def("poll", &DeviceHandle::poll)
      .def("make_room", &DeviceHandle::make_room, py::arg("device"), py::arg("stream"))
      .def_property_readonly("library", &DeviceHandle::library)
      .def("_work", &DeviceHandle::work, NoGil())
      .def("limit_window", &DeviceHandle::limit_window, py::arg("nbytes"), NoGil())
      // Keeps the GIL: makes threads.
      .def("start_workers", &DeviceHandle::start_workers)
      // Release the GIL: may wait for another thread's call, or unmap; `flush` waits for workers.
      .def("flush", &DeviceHandle::flush, NoGil())
      .def("shutdown", &DeviceHandle::close, NoGil())
      .def("trim", &DeviceHandle::trim, NoGil())
      .def("stats", &DeviceHandle::stats, NoGil())
      .def("pool_stats", &DeviceHandle::pool_stats, NoGil());

  // Keeps the GIL. Empty if the driver can be opened, else why not.
  module.def(
      "why_no_driver", [](const std::string& library) { return opened_driver(library).why; }, py::arg("library"));
  py::module_::import("atexit").attr("register")(py::cpp_function(&close_all));
}

}  // namespace actckpt::python
