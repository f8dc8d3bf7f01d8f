#include "engine/python/device_handles.h"

#include <pybind11/stl.h>

#include <vector>

namespace actckpt::python {
namespace {

// Gives what a call released to Python when the call ends, also by an exception.
class Finisher {
 public:
  explicit Finisher(DeviceHandle* owner) : owner_(owner) {}
  Finisher(const Finisher&) = delete;
  Finisher& operator=(const Finisher&) = delete;
  ~Finisher() { owner_->finish(releases_); }
  Releases* operator&() { return &releases_; }

 private:
  DeviceHandle* const owner_;
  Releases releases_;
};

}  // namespace

DeviceHandle::DeviceHandle(std::shared_ptr<cuda::CudaBackend> backend, const PoolConfig& pool,
                           std::uint64_t window_bytes, py::object release)
    : backend_(std::move(backend)),
      pool_(std::make_shared<Pool>(pool, backend_.get())),
      engine_(std::make_unique<DeviceEngine>(backend_, pool_, DeviceConfig{window_bytes, {}})),
      release_(std::move(release)) {}

void DeviceHandle::finish(const Releases& releases) noexcept {
  if (releases.empty()) {
    return;
  }
  py::error_scope pending;  // a destructor may run while an exception is on its way
  for (const Release& release : releases) {
    auto* const object = static_cast<PyObject*>(release.keep);
    if (!release.uses.empty()) {
      try {
        std::vector<std::pair<int, std::uintptr_t>> uses;
        for (const Stream& use : release.uses) {
          uses.emplace_back(use.device, use.handle);
        }
        release_(py::handle(object), uses);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("actckpt release of an offloaded tensor");
      }
    }
    Py_DECREF(object);
  }
}

py::object DeviceHandle::put(std::uintptr_t ptr, std::uint64_t nbytes, int device,
                             std::uintptr_t stream, const py::object& keep) {
  Reference reference(keep);
  Finisher released(this);
  Put put{PutOutcome::kKeptFailed, nullptr};
  {
    const py::gil_scoped_release no_gil;
    put = engine_->put(ptr, nbytes, {device, stream}, reference.get(), &released);
  }
  if (put.outcome == PutOutcome::kTaken || put.outcome == PutOutcome::kKeptStranded) {
    reference.commit();
  }
  if (put.ticket == nullptr) {
    return py::cast(put.outcome);
  }
  return py::cast(std::make_unique<DeviceTicketHandle>(shared_from_this(), std::move(put.ticket)));
}

void DeviceHandle::poll() {
  Finisher released(this);
  engine_->poll(&released);
}

void DeviceTicketHandle::use(int device, std::uintptr_t stream) {
  owner_->engine()->use(ticket_, {device, stream});
}

py::object DeviceTicketHandle::get(int device, std::uintptr_t stream) {
  Finisher released(owner_.get());
  const Got got = owner_->engine()->get(ticket_, {device, stream}, &released);
  if (got.keep == nullptr) {
    return py::none();
  }
  return py::make_tuple(py::handle(static_cast<PyObject*>(got.keep)), got.record_stream);
}

bool DeviceTicketHandle::load(int device, std::uintptr_t stream, std::uintptr_t ptr,
                              const py::object& keep, bool urgent) {
  Reference reference(keep);
  Finisher released(owner_.get());
  const bool taken = owner_->engine()->load(ticket_, {device, stream}, ptr, reference.get(),
                                            urgent ? Side::kUrgent : Side::kIn, &released);
  if (taken) {
    reference.commit();
  }
  return taken;
}

void DeviceTicketHandle::unload() {
  Finisher released(owner_.get());
  owner_->engine()->unload(ticket_, &released);
}

void DeviceTicketHandle::drop() {
  Finisher released(owner_.get());
  owner_->engine()->drop(ticket_, &released);
}

}  // namespace actckpt::python
