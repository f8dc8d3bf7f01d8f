#include "sim/device/backend/generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include <array>

#include "sim/device/backend/devices.h"

namespace actckpt::sim_device {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(int device, at::Generator cpu)
      : c10::GeneratorImpl(torch_device(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }
  void set_current_seed(std::uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { cpu_.set_offset(offset); }
  std::uint64_t get_offset() const override { return cpu_.get_offset(); }
  std::uint64_t current_seed() const override { return cpu_.current_seed(); }
  std::uint64_t seed() override { return cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    check_nothing_captures();
    cpu_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    check_nothing_captures();
    return cpu_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  // As torch's generator of CUDA.
  static void check_nothing_captures() {
    const Lock lock = lock_machine();
    TORCH_CHECK(!streams().is_any_capturing(), "the state of a generator was used while a stream is captured");
  }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), cpu_.clone()); }

  at::Generator cpu_;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int device) {
  static auto* const all = new std::array<at::Generator, kNumDevices>([] {
    std::array<at::Generator, kNumDevices> made;
    for (int i = 0; i < kNumDevices; ++i) {
      made[static_cast<std::size_t>(i)] = new_generator(i);
    }
    return made;
  }());
  return (*all)[static_cast<std::size_t>(device)];
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  return static_cast<const DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace actckpt::sim_device
