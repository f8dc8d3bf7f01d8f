#include "bind/cpu_store.h"

#include <exception>
#include <utility>

#include "core/names.h"
#include "offload/bytes.h"

namespace actckpt::python {
namespace {

// Throws the current engine exception as the registered Python error.
[[noreturn]] void throw_as_python() {
  static auto* const rethrow = new py::cpp_function(
      [](std::uintptr_t error) { std::rethrow_exception(*reinterpret_cast<const std::exception_ptr*>(error)); });
  const std::exception_ptr error = std::current_exception();
  (*rethrow)(reinterpret_cast<std::uintptr_t>(&error));
  std::terminate();
}

// The result of `body`; throws only Python errors.
template <typename Body>
auto in_python(Body body) {
  try {
    return body();
  } catch (const py::error_already_set&) {
    throw;
  } catch (...) {
    throw_as_python();
  }
}

constexpr Stream kHost{0, 0};

class CpuTicket final : public StoreTicket {
 public:
  CpuTicket(CpuStore* store, DeviceTicketPtr ticket, PyObject* device)
      : store_(store),
        handle_(store->engine(), std::move(ticket)),
        device_(py::reinterpret_borrow<py::object>(device)) {}

  py::object fetch() override {
    return in_python([this] {
      store_->check_writes();
      DeviceTicketHandle::Found found = handle_.find(kHost);
      while (!found.object) {  // again if another thread unloads in between
        load(true);
        found = handle_.find(kHost);
      }
      return found.object;
    });
  }

  py::object prefetch() override {
    return in_python([this] { return load(false); });
  }

  void unload() override {
    in_python([this] { handle_.unload(); });
  }

  void saved_again(PyObject*) override {}

 private:
  // The destination, or None if there is one already.
  py::object load(bool urgent) {
    py::object buffer = allocate_bytes(static_cast<long long>(handle_.nbytes()), device_.ptr());
    const auto address = static_cast<std::uintptr_t>(address_of(buffer.ptr()));
    return handle_.load(kHost.device, kHost.handle, address, buffer, urgent) ? buffer : py::none();
  }

  CpuStore* const store_;  // its Python object outlives this
  DeviceTicketHandle handle_;
  const py::object device_;
};

}  // namespace

std::unique_ptr<StoreTicket> CpuStore::put(const Source& source, bool must) {
  return in_python([&]() -> std::unique_ptr<StoreTicket> {
    check_writes();
    Put put = engine_->put_bytes(static_cast<std::uintptr_t>(source.address), static_cast<std::uint64_t>(source.nbytes),
                                 kHost, py::reinterpret_borrow<py::object>(source.bytes), must);
    if (put.outcome == PutOutcome::kKeptFull) {
      call_with(names().tell_of_full_file, py::cast(engine_).ptr(), number(source.nbytes).ptr());
    }
    if (put.ticket == nullptr) return nullptr;
    return std::make_unique<CpuTicket>(this, std::move(put.ticket), source.device);
  });
}

void CpuStore::check_writes() {
  const std::uint64_t num_failed = engine_->engine()->num_failed_writes();
  if (num_failed == num_told_) return;
  num_told_ = num_failed;
  call(names().tell_of_writes, py::cast(engine_->stats()).ptr());
}

}  // namespace actckpt::python
