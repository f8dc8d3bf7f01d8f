// The extension of the tests: simulated machines, a mock of the CUDA driver and a file system that misbehaves. The last
// two go under the engine of actckpt._C in capsules.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bind/given.h"
#include "sim/faulty_file_io.h"
#include "sim/mock_driver.h"
#include "sim/run.h"

namespace actckpt::sim {
namespace {

namespace py = pybind11;

// One device of the mock driver with two streams. Nothing runs before `drain`.
class MockCuda : public std::enable_shared_from_this<MockCuda> {
 public:
  MockCuda() : world_(0), driver_(&world_, {world_.add_queue(0)}) {
    world_.add_queue(0);
    world_.set_eagerness(0);
    driver_.set_may_wait([] { return PyGILState_Check() == 0; });
  }

  void drain() { world_.drain(); }
  MockDriver& driver() { return driver_; }
  python::GivenDriver given() {
    return {driver_.table(), [self = shared_from_this()] { self->drain(); }, {}};
  }

 private:
  World world_;
  MockDriver driver_;
};

void bind_mock(py::module_& module) {
  py::class_<MockCuda, std::shared_ptr<MockCuda>>(module, "MockCuda")
      .def(py::init<>())
      .def_property_readonly("driver",
                             [](MockCuda& self) { return python::capsule_of(self.given(), python::kDriverCapsule); })
      .def("drain", &MockCuda::drain)
      .def("fail_at", [](MockCuda& self, std::uint64_t n, int code) { self.driver().fail_at(n, code); })
      .def("set_capturing", [](MockCuda& self, int queue, bool on) { self.driver().set_capturing(queue, on); })
      .def("refuse_pins", [](MockCuda& self, bool on) { self.driver().refuse_pins(on); })
      .def("set_node", [](MockCuda& self, int node) { self.driver().set_node(node); })
      .def_property_readonly("num_calls", [](MockCuda& self) { return self.driver().num_calls(); })
      .def_property_readonly("num_pinned_bytes", [](MockCuda& self) { return self.driver().num_pinned_bytes(); })
      .def_property_readonly("faults", [](MockCuda& self) { return self.driver().faults(); });
  // A driver of a library for the engine, which then leaves out a rule of the protocol.
  module.def("driver_without", [](const std::string& library, const std::string& rule) {
    const cuda::OpenedDriver opened = cuda::open_driver(library.c_str());
    if (opened.driver == nullptr) throw py::value_error(opened.why);
    return python::capsule_of(python::GivenDriver{opened.driver, [] {}, rules_without(rule)}, python::kDriverCapsule);
  });
  module.def("missing_in_driver", [](const std::string& library) { return cuda::open_driver(library.c_str()).why; });
}

void bind_faults(py::module_& module) {
  py::class_<Faults>(module, "Faults")
      .def(py::init<>())
      .def_readwrite("fail_write_at", &Faults::fail_write_at)
      .def_readwrite("write_errno", &Faults::write_errno)
      .def_readwrite("max_write_bytes", &Faults::max_write_bytes)
      .def_readwrite("fail_read_at", &Faults::fail_read_at)
      .def_readwrite("read_errno", &Faults::read_errno)
      .def_readwrite("max_read_bytes", &Faults::max_read_bytes)
      .def_readwrite("alter_read_at", &Faults::alter_read_at)
      .def_readwrite("end_of_file_at", &Faults::end_of_file_at)
      .def_readwrite("hold_writes", &Faults::hold_writes)
      .def_readwrite("hold_reads", &Faults::hold_reads);

  // Keeps the GIL: a leaf lock.
  py::class_<FaultyFileIo, std::shared_ptr<FaultyFileIo>>(module, "FaultyFileIo")
      .def(py::init<>())
      .def("set", &FaultyFileIo::set, py::arg("faults"))
      .def_property_readonly("num_held", &FaultyFileIo::num_held)
      .def_property_readonly("capsule", [](std::shared_ptr<FaultyFileIo> self) {
        return python::capsule_of(python::GivenFileIo(std::move(self)), python::kFileIoCapsule);
      });
}

// The figures of an engine that the tests of the protocol read.
void bind_figures(py::module_& module) {
  py::class_<DeviceStats>(module, "Figures", py::module_local())
      .def_readonly("num_puts", &DeviceStats::num_puts)
      .def_readonly("reloaded_bytes", &DeviceStats::reloaded_bytes)
      .def_readonly("num_revived", &DeviceStats::num_revived)
      .def_readonly("num_early_releases", &DeviceStats::num_early_releases)
      .def_readonly("num_prefetched", &DeviceStats::num_prefetched)
      .def_readonly("num_kept_busy", &DeviceStats::num_kept_busy)
      .def_readonly("num_kept_behind", &DeviceStats::num_kept_behind)
      .def_readonly("num_host_waits", &DeviceStats::num_host_waits)
      .def_readonly("stranded_bytes", &DeviceStats::stranded_bytes)
      .def_readonly("last_error", &DeviceStats::last_error)
      .def_readonly("num_disk_puts", &DeviceStats::num_tier_puts)
      .def_property_readonly("num_failed_writes", [](const DeviceStats& self) { return self.spill.num_failed_drains; })
      .def_property_readonly("num_failed_reads", [](const DeviceStats& self) { return self.spill.num_failed_fills; });
}

void bind_runs(py::module_& module) {
  py::class_<Report>(module, "Report")
      .def_readonly("num_races", &Report::num_races)
      .def_readonly("num_wrong", &Report::num_wrong)
      .def_readonly("num_leaked", &Report::num_leaked)
      .def_readonly("num_errors", &Report::num_errors)
      .def_readonly("num_faults", &Report::num_faults)
      .def_readonly("num_failed_gets", &Report::num_failed_gets)
      .def_readonly("races", &Report::races)
      .def_readonly("stats", &Report::stats);
  module.def("rules", [] {
    std::vector<std::string> names;
    for (const NamedRule& rule : kNamedRules) {
      names.emplace_back(rule.name);
    }
    return names;
  });
  // Keeps the GIL: the mock driver serves one run at a time.
  module.def("run_on_mock_cuda", &run_on_mock_cuda, py::arg("seed"), py::arg("without") = "", py::arg("fail_at") = 0,
             py::arg("code") = 700);
}

}  // namespace
}  // namespace actckpt::sim

#if PYBIND11_VERSION_HEX >= 0x03010000
#define ACTCKPT_GIL_USED pybind11::mod_gil_used()
#else
#define ACTCKPT_GIL_USED pybind11::mod_gil_not_used(false)
#endif

PYBIND11_MODULE(_sim, module, ACTCKPT_GIL_USED) {
  actckpt::sim::bind_mock(module);
  actckpt::sim::bind_faults(module);
  actckpt::sim::bind_figures(module);
  actckpt::sim::bind_runs(module);
}
