#include "bind/device_handles.h"

#include <pybind11/stl.h>

#include <vector>

namespace actckpt::python {
namespace {

// Passes what a call released to Python when the call ends, also after an exception.
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

DeviceConfig engine_config(const HandleSettings& settings) {
  DeviceConfig config;
  config.window_bytes = settings.window_bytes;
  config.rules = settings.rules;
  config.spill.buffer_bytes = settings.buffer_bytes;
  config.spill.num_in_buffers = settings.bounce_bytes / settings.buffer_bytes / 2;
  config.spill.num_out_buffers = config.spill.num_in_buffers;
  return config;
}

Below below(const HandleSettings& settings, const std::shared_ptr<Workers>& workers, SlabRegistrar* registrar) {
  Below below;
  if (settings.file != nullptr) {
    below.tier = std::make_shared<DiskTier>(settings.file, workers);
  }
  below.registrar = registrar;
  below.wake = [workers = workers.get()] { workers->wake(); };
  below.help = [workers = workers.get()] { return workers->run_one(); };
  return below;
}

}  // namespace

DeviceHandle::DeviceHandle(std::shared_ptr<Backend> backend, SlabRegistrar* registrar, const HandleSettings& settings,
                           py::object release, DeviceEngine::Pause pause)
    : library_(settings.library),
      backend_(std::move(backend)),
      is_host_(registrar == nullptr),
      pool_(std::make_shared<Pool>(settings.pool, registrar)),
      workers_(Workers::make(settings.num_workers)),
      engine_(std::make_unique<DeviceEngine>(backend_, pool_, engine_config(settings),
                                             below(settings, workers_, registrar), std::move(pause))),
      release_(std::move(release)),
      streams_(py::isinstance<TorchStreams>(release_) ? release_.cast<TorchStreams*>() : nullptr) {
  workers_->set_progress([engine = engine_.get()] { return engine->advance(); });
}

// Without the GIL: threads end, and memory is unpinned, which waits for the device.
DeviceHandle::~DeviceHandle() noexcept {
  Releases releases;
  {
    const py::gil_scoped_release no_gil;
    workers_->stop();
    engine_->finish(&releases);
  }
  finish(releases);
  const py::gil_scoped_release no_gil;
  engine_.reset();
  pool_.reset();
}

void DeviceHandle::work() {
  engine_->advance();
  while (workers_->run_one()) {
    engine_->advance();
  }
}

void DeviceHandle::close() noexcept {
  workers_->stop();
  engine_->close();
  backend_->close();
}

void DeviceHandle::finish(const Releases& releases) noexcept {
  if (releases.empty()) {
    return;
  }
  py::error_scope pending;  // a destructor may run while an exception propagates
  for (const Release& release : releases) {
    auto* const object = static_cast<PyObject*>(release.keep);
    if (!release.uses.empty() && !is_host_) {
      try {
        tell_uses(object, release.uses);
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("actckpt release of an offloaded tensor");
      }
    }
    Py_DECREF(object);
  }
}

void DeviceHandle::tell_uses(py::handle keep, const Uses& uses) {
  if (streams_ != nullptr) {
    streams_->record(keep.ptr(), uses);
    return;
  }
  std::vector<std::pair<int, std::uintptr_t>> pairs;
  for (const Stream& use : uses) {
    pairs.emplace_back(use.device, use.handle);
  }
  release_(keep, pairs);
}

Put DeviceHandle::put_bytes(std::uintptr_t ptr, std::uint64_t nbytes, Stream stream, const py::object& keep,
                            bool must) {
  Reference reference(keep);
  Finisher released(this);
  Put put{PutOutcome::kKeptFailed, nullptr};
  {
    const py::gil_scoped_release no_gil;
    put = engine_->put(ptr, nbytes, stream, reference.get(), must, &released);
    if (is_host_) {
      engine_->poll(&released);  // the copy has ended
    }
  }
  if (put.holds_keep) {
    reference.commit();
  }
  return put;
}

py::object DeviceHandle::put(std::uintptr_t ptr, std::uint64_t nbytes, int device, std::uintptr_t stream,
                             const py::object& keep, bool must) {
  Put put = put_bytes(ptr, nbytes, {device, stream}, keep, must);
  if (put.ticket == nullptr) {
    return py::cast(put.outcome);
  }
  return py::cast(std::make_unique<DeviceTicketHandle>(shared_from_this(), std::move(put.ticket)));
}

std::pair<int, std::string> DeviceHandle::start_workers() {
  std::string why;
  const int num_granted = workers_->start_all(&why);
  return {num_granted, why};
}

void DeviceHandle::poll() {
  Finisher released(this);
  engine_->poll(&released);
}

void DeviceHandle::make_room(int device, std::uintptr_t stream) {
  Finisher released(this);
  engine_->make_room({device, stream}, &released);
}

bool DeviceTicketHandle::use(int device, std::uintptr_t stream) {
  return owner_->engine()->use(ticket_, {device, stream});
}

DeviceTicketHandle::Found DeviceTicketHandle::find(Stream stream) {
  for (;;) {
    Finisher released(owner_.get());
    const Got got = owner_->engine()->get(ticket_, stream, &released);
    if (got.kind == GotKind::kNeedsLoad) {
      return {};
    }
    if (got.kind != GotKind::kBusy) {
      return {py::reinterpret_borrow<py::object>(static_cast<PyObject*>(got.keep)), got.record_stream};
    }
    const py::gil_scoped_release no_gil;
    owner_->engine()->wait(ticket_);
  }
}

py::object DeviceTicketHandle::get(int device, std::uintptr_t stream) {
  const Found found = find({device, stream});
  if (!found.object) return py::none();
  return py::make_tuple(found.object, found.record_stream);
}

const char* DeviceTicketHandle::tier() const { return ticket_->is_below ? "disk" : "pinned"; }

bool DeviceTicketHandle::load(int device, std::uintptr_t stream, std::uintptr_t ptr, const py::object& keep,
                              bool urgent) {
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
