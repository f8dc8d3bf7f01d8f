// What Python sees of the machine: controls for tests, and what torch.sim needs.

#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "sim/device/backend/devices.h"
#include "sim/device/backend/generator.h"
#include "sim/device/machine/driver.h"
#include "sim/device/machine/memory.h"
#include "sim/device/machine/pinned.h"

namespace actckpt::sim_device {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

Stream* found(const Lock&, int device, std::int64_t id) {
  Stream* const stream = streams().find(index_of(static_cast<c10::DeviceIndex>(device)), id);
  TORCH_CHECK(stream != nullptr, "sim:", device, " has no stream ", id);
  return stream;
}

void bind_streams(py::module_& module) {
  module.def("stream_handle", [](int device, std::int64_t id) {
    const Lock lock = lock_machine();
    return reinterpret_cast<std::uintptr_t>(handle_of(found(lock, device, id)));
  });
  module.def("current_handle", [](int device) {
    const Stream* const stream = current_stream(index_of(static_cast<c10::DeviceIndex>(device)));
    return reinterpret_cast<std::uintptr_t>(handle_of(stream));
  });
  module.def("stream_id", [](int device, std::uintptr_t handle) {
    const Lock lock = lock_machine();
    const Stream* const stream =
        stream_of(index_of(static_cast<c10::DeviceIndex>(device)), reinterpret_cast<const void*>(handle));
    TORCH_CHECK(stream != nullptr, "sim:", device, " has no stream with handle ", handle);
    return stream->id;
  });
  module.def("set_capturing", [](int device, std::int64_t id, bool is_capturing) {
    const Lock lock = lock_machine();
    found(lock, device, id)->is_capturing = is_capturing;
  });
  module.def("is_capturing", [](int device, std::int64_t id) {
    const Lock lock = lock_machine();
    return found(lock, device, id)->is_capturing;
  });
  module.def("num_pending", [](int device) {
    const Lock lock = lock_machine();
    return streams().num_pending(device);
  });
  module.def("set_adversary", [](std::uint64_t seed, double eagerness, double reluctance, bool is_for_caller) {
    const Lock lock = lock_machine();
    streams().set_adversary(seed, eagerness, reluctance, is_for_caller);
  });
  module.def(
      "settle",
      [] {
        Lock lock = lock_machine();
        streams().settle(lock);
      },
      NoGil());
}

void bind_time(py::module_& module) {
  module.def("host_time_s", [] {
    const Lock lock = lock_machine();
    return streams().host_time_s();
  });
  module.def("advance", [](int device, std::int64_t id, double seconds) {
    const Lock lock = lock_machine();
    streams().advance(lock, found(lock, device, id), seconds);
  });
  module.def("set_rates", [](double out_bytes_per_s, double back_bytes_per_s, double kernel_bytes_per_s) {
    const Lock lock = lock_machine();
    streams().link_bytes_per_s = {out_bytes_per_s, back_bytes_per_s};
    streams().kernel_bytes_per_s = kernel_bytes_per_s;
  });
}

void bind_memory(py::module_& module) {
  module.def("capacity", [](int device) {
    const Lock lock = lock_machine();
    return device_memory().capacity(device);
  });
  module.def("set_capacity", [](int device, std::uint64_t bytes) {
    const Lock lock = lock_machine();
    device_memory().set_capacity(device, bytes);
  });
  module.def("num_allocations", [] {
    const Lock lock = lock_machine();
    return device_memory().num_allocations;
  });
  // The n-th from now on, 1 is the next one; 0: none.
  module.def("fail_allocation", [](std::uint64_t n) {
    const Lock lock = lock_machine();
    device_memory().failing_allocation = n == 0 ? 0 : device_memory().num_allocations + n;
  });
  module.def("set_judges_frees", [](bool judges) {
    const Lock lock = lock_machine();
    device_memory().judges_frees = judges;
  });
  module.def("snapshot", [](int device) {
    Lock lock = lock_machine();
    const std::vector<Block> blocks = device_memory().snapshot(device);
    lock.unlock();
    py::list all;
    for (const Block& block : blocks) {
      all.append(py::dict(py::arg("address") = block.range().begin, py::arg("size") = block.bytes,
                          py::arg("requested_size") = block.requested_bytes, py::arg("stream") = block.home->id));
    }
    return all;
  });
  module.def("num_registered_bytes", [] {
    const Lock lock = lock_machine();
    return pinned_memory().num_registered_bytes();
  });
}

void bind_driver(py::module_& module) {
  module.def("take_faults", [] {
    const Lock lock = lock_machine();
    return faults().take();
  });
  module.def("fail_driver_from", [](std::optional<std::uint64_t> calls, int code) {
    const Lock lock = lock_machine();
    DriverControls& controls = driver_controls();
    controls.fails_from = calls.has_value() ? controls.num_calls + *calls : DriverControls::kNever;
    controls.failure = code;
  });
  module.def("num_driver_calls", [] {
    const Lock lock = lock_machine();
    return driver_controls().num_calls;
  });
  module.def("refuse_pins", [](bool refuses) {
    const Lock lock = lock_machine();
    driver_controls().refuses_pins = refuses;
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("device_count", [] { return kNumDevices; });
  module.def("default_generator", [](int device) { return default_generator(device); });
  bind_streams(module);
  bind_time(module);
  bind_memory(module);
  bind_driver(module);
}

}  // namespace actckpt::sim_device
