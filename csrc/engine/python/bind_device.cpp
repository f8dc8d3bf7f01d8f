// Device engine, its tickets, and the simulated machines that test it.
// Each function says what it does with the GIL.

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/cuda_backend.h"
#include "engine/errors.h"
#include "engine/protocol/device_engine.h"
#include "engine/python/bindings.h"
#include "engine/python/device_handles.h"

namespace actckpt::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Backends to close at exit. Guarded by the GIL; leaked, since modules may outlive statics.
std::vector<std::weak_ptr<cuda::CudaBackend>>& backends() {
  static auto* const all = new std::vector<std::weak_ptr<cuda::CudaBackend>>();
  return *all;
}

void close_all() {
  for (const auto& weak : backends()) {
    if (const auto backend = weak.lock()) {
      backend->close();
    }
  }
  backends().clear();
}

const cuda::OpenedDriver& opened_driver() {
  static const cuda::OpenedDriver opened = cuda::open_driver();
  return opened;
}

std::shared_ptr<DeviceHandle> open_cuda(std::uint64_t limit_bytes, std::uint64_t window_bytes,
                                        const py::object& release) {
  const cuda::OpenedDriver& opened = opened_driver();
  if (opened.driver == nullptr) {
    throw DeviceError("the CUDA backend is unusable: " + opened.why + ".");
  }
  auto backend = std::make_shared<cuda::CudaBackend>(opened.driver);
  backends().push_back(backend);
  PoolConfig pool_config;
  pool_config.limit_bytes = limit_bytes;
  // The registrar must outlive the pool: the handle's members are destroyed in reverse order.
  return std::make_shared<DeviceHandle>(backend, pool_config, window_bytes, release);
}

void bind_stats(py::module_& module) {
  py::enum_<PutOutcome>(module, "Kept")
      .value("CAPTURING", PutOutcome::kKeptCapturing)
      .value("FULL", PutOutcome::kKeptFull)
      .value("FAILED", PutOutcome::kKeptFailed)
      .value("STRANDED", PutOutcome::kKeptStranded);

  py::class_<DeviceStats>(module, "DeviceStats")
      .def_readonly("num_puts", &DeviceStats::num_puts)
      .def_readonly("offloaded_bytes", &DeviceStats::offloaded_bytes)
      .def_readonly("reloaded_bytes", &DeviceStats::reloaded_bytes)
      .def_readonly("inflight_bytes", &DeviceStats::inflight_bytes)
      .def_readonly("peak_inflight_bytes", &DeviceStats::peak_inflight_bytes)
      .def_readonly("graveyard_bytes", &DeviceStats::graveyard_bytes)
      .def_readonly("stranded_bytes", &DeviceStats::stranded_bytes)
      .def_readonly("num_live", &DeviceStats::num_live)
      .def_readonly("num_revived", &DeviceStats::num_revived)
      .def_readonly("num_early_releases", &DeviceStats::num_early_releases)
      .def_readonly("num_kept_full", &DeviceStats::num_kept_full)
      .def_readonly("num_kept_capturing", &DeviceStats::num_kept_capturing)
      .def_readonly("num_kept_failed", &DeviceStats::num_kept_failed)
      .def_readonly("last_error", &DeviceStats::last_error);
}

}  // namespace

void bind_device(py::module_& module) {
  bind_stats(module);
  py::class_<DeviceTicketHandle>(module, "DeviceTicket")
      .def("use", &DeviceTicketHandle::use, py::arg("device"), py::arg("stream"))
      .def("get", &DeviceTicketHandle::get, py::arg("device"), py::arg("stream"))
      .def("load", &DeviceTicketHandle::load, py::arg("device"), py::arg("stream"), py::arg("ptr"),
           py::arg("keep"), py::kw_only(), py::arg("urgent"))
      .def("unload", &DeviceTicketHandle::unload)
      .def("drop", &DeviceTicketHandle::drop)
      .def_property_readonly("nbytes", &DeviceTicketHandle::nbytes)
      .def_property_readonly("put_stream", &DeviceTicketHandle::put_stream);

  py::class_<DeviceHandle, std::shared_ptr<DeviceHandle>>(module, "DeviceEngine")
      .def_static("cuda", &open_cuda, py::kw_only(), py::arg("limit_bytes"),
                  py::arg("window_bytes"), py::arg("release"))
      .def("put", &DeviceHandle::put, py::arg("ptr"), py::arg("nbytes"), py::arg("device"),
           py::arg("stream"), py::arg("keep"))
      .def("poll", &DeviceHandle::poll)
      // Release the GIL: may wait for another thread's call, or unmap.
      .def("trim", &DeviceHandle::trim, NoGil())
      .def("stats", &DeviceHandle::stats, NoGil())
      .def("pool_stats", &DeviceHandle::pool_stats, NoGil());

  // Keeps the GIL. Empty if the driver is usable, else why not.
  module.def("why_no_cuda", [] { return opened_driver().why; });
  module.def("_missing_in_driver",
             [](const std::string& library) { return cuda::open_driver(library.c_str()).why; });
  py::module_::import("atexit").attr("register")(py::cpp_function(&close_all));
}

}  // namespace actckpt::python
