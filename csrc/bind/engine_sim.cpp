// The simulated machine and the mock driver, for tests. Everything releases or needs no GIL.

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/device_handles.h"
#include "engine/sim/mock_driver.h"
#include "engine/sim/run.h"

namespace actckpt::python {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// One device of the mock driver with two streams, and an engine on it. Nothing runs before `drain`.
class MockCuda {
 public:
  MockCuda() : world_(0), driver_(&world_, {world_.add_queue(0)}) {
    world_.add_queue(0);
    world_.set_eagerness(0);
  }

  // Workers' jobs run where somebody waits, and in `_work`.
  std::shared_ptr<DeviceHandle> engine(std::uint64_t limit_bytes, std::optional<std::uint64_t> window_bytes,
                                       const py::object& release, std::uint64_t pageable_limit,
                                       std::shared_ptr<SpillFile> file, std::uint64_t bounce_bytes,
                                       std::uint64_t buffer_bytes) {
    HandleSettings settings;
    settings.pool.limit_bytes = limit_bytes;
    settings.window_bytes = window_bytes.value_or(kFollowsSizes);
    settings.pageable_limit_bytes = pageable_limit;
    settings.file = std::move(file);
    settings.bounce_bytes = bounce_bytes;
    settings.buffer_bytes = buffer_bytes;
    settings.num_workers = 0;
    auto backend = std::make_shared<cuda::CudaBackend>(driver_.table());
    backend_ = backend;
    auto handle = std::make_shared<DeviceHandle>(backend, settings, release, [this](DeviceEngine::Lock& lock) {
      world_.drain();
      const auto waited_for = handle_.lock();
      lock.unlock();
      waited_for->work();
      lock.lock();
    });
    handle_ = handle;
    return handle;
  }
  void close() { backend_->close(); }
  void drain() { world_.drain(); }
  sim::MockDriver& driver() { return driver_; }

 private:
  sim::World world_;
  sim::MockDriver driver_;
  std::shared_ptr<cuda::CudaBackend> backend_;
  std::weak_ptr<DeviceHandle> handle_;
};

void bind_mock(py::module_& module) {
  py::class_<MockCuda>(module, "MockCuda")
      .def(py::init<>())
      .def("engine", &MockCuda::engine, py::kw_only(), py::arg("limit_bytes"), py::arg("window_bytes"),
           py::arg("release"), py::arg("pageable_limit") = 0, py::arg("spill_file") = nullptr,
           py::arg("bounce_bytes") = 0, py::arg("buffer_bytes") = SpillSettings().buffer_bytes, py::keep_alive<0, 1>())
      .def("drain", &MockCuda::drain)
      .def("close", &MockCuda::close)
      .def("fail_at", [](MockCuda& self, std::uint64_t n, int code) { self.driver().fail_at(n, code); })
      .def("set_capturing", [](MockCuda& self, int queue, bool on) { self.driver().set_capturing(queue, on); })
      .def("refuse_pins", [](MockCuda& self, bool on) { self.driver().refuse_pins(on); })
      .def_property_readonly("num_calls", [](MockCuda& self) { return self.driver().num_calls(); })
      .def_property_readonly("num_pinned_bytes", [](MockCuda& self) { return self.driver().num_pinned_bytes(); })
      .def_property_readonly("faults", [](MockCuda& self) { return self.driver().faults(); });
}

}  // namespace

void bind_sim(py::module_& module) {
  py::module_ sim = module.def_submodule("sim", "Simulated machines that test the event protocol.");
  py::class_<sim::Report>(sim, "Report")
      .def_readonly("num_races", &sim::Report::num_races)
      .def_readonly("num_wrong", &sim::Report::num_wrong)
      .def_readonly("num_leaked", &sim::Report::num_leaked)
      .def_readonly("num_errors", &sim::Report::num_errors)
      .def_readonly("num_faults", &sim::Report::num_faults)
      .def_readonly("num_failed_gets", &sim::Report::num_failed_gets)
      .def_readonly("races", &sim::Report::races)
      .def_readonly("stats", &sim::Report::stats);
  sim.def("rules", [] {
    std::vector<std::string> names;
    for (const NamedRule& rule : kNamedRules) {
      names.emplace_back(rule.name);
    }
    return names;
  });
  sim.def("run_on_sim", &sim::run_on_sim, py::arg("seed"), py::arg("without") = "", NoGil());
  // Keeps the GIL: the mock driver serves one run at a time.
  sim.def("run_on_mock_cuda", &sim::run_on_mock_cuda, py::arg("seed"), py::arg("without") = "", py::arg("fail_at") = 0,
          py::arg("code") = 700);
  bind_mock(sim);
}

}  // namespace actckpt::python
