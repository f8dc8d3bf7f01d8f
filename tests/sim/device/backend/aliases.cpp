#include "sim/device/backend/aliases.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "sim/device/backend/allocators.h"
#include "sim/device/backend/devices.h"

namespace actckpt::sim_device {
namespace {

using Keys = c10::DispatchKeySet;

const Keys kPython = Keys(c10::DispatchKey::Python) | Keys(c10::DispatchKey::PythonTLSSnapshot);

// The VIEW constructor takes keys as they are: bits of conj, neg and inference tensors carry over.
at::Tensor same_view(const at::Tensor& of, const c10::Storage& storage, Keys keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), keys, of.dtype());
  c10::TensorImpl* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return made;
}

c10::Storage storage_on(c10::DataPtr data, std::size_t bytes, c10::Allocator* allocator, bool is_resizable) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), allocator,
                                               is_resizable);
}

void require_strided(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.layout() == at::kStrided, "sim has strided tensors only, not ", tensor.layout());
}

}  // namespace

c10::Storage Aliases::to_cpu(const c10::Storage& storage) {
  for (const StoragePair& pair : storages_) {
    if (pair.device.is_alias_of(storage)) {
      return pair.cpu;
    }
  }
  c10::DataPtr borrowed(storage.unsafeGetStorageImpl()->mutable_data(), c10::Device(c10::kCPU));
  storages_.push_back(
      {storage_on(std::move(borrowed), storage.nbytes(), c10::GetCPUAllocator(), storage.resizable()), storage});
  return storages_.back().cpu;
}

at::Tensor Aliases::to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  for (const auto& [alias, behind] : tensors_) {
    if (behind.is_same(tensor)) {
      return alias;
    }
  }
  require_strided(tensor);
  const Keys keys = (tensor.key_set() - Keys(c10::DispatchKey::AutocastPrivateUse1) - kPython)
                        .remove_backend(c10::BackendComponent::PrivateUse1Bit) |
                    Keys(c10::BackendComponent::CPUBit);
  tensors_.emplace_back(same_view(tensor, to_cpu(tensor.storage()), keys), tensor);
  return tensors_.back().first;
}

// The memory that a kernel allocated, or a copy where it has another owner.
c10::DataPtr Aliases::taken_from(c10::StorageImpl* cpu) const {
  const std::size_t bytes = cpu->nbytes();
  if (bytes > 0 && cpu->data_ptr().get_deleter() == &free_device_memory) {
    c10::DataPtr data = cpu->set_data_ptr(c10::DataPtr(cpu->mutable_data(), c10::Device(c10::kCPU)));
    data.unsafe_set_device(torch_device(device_));
    return data;
  }
  c10::DataPtr data = allocate_on(device_, bytes);
  if (bytes > 0) {
    std::memcpy(data.get(), cpu->data(), bytes);
  }
  return data;
}

// Of a tensor that the kernel returned, or put behind an alias.
c10::Storage Aliases::device_storage_of(const c10::Storage& cpu) {
  for (const StoragePair& pair : storages_) {
    if (pair.cpu.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) {
      return pair.device;
    }
  }
  const std::size_t bytes = cpu.nbytes();
  c10::DataPtr data = taken_from(cpu.unsafeGetStorageImpl());
  fresh_ranges_.push_back(range_of(data.get(), bytes));
  storages_.push_back({cpu, storage_on(std::move(data), bytes, device_allocator(), true)});
  return storages_.back().device;
}

at::Tensor Aliases::to_device(const at::Tensor& result) {
  if (!result.defined()) {
    return result;
  }
  for (const auto& [alias, behind] : tensors_) {
    if (alias.is_same(result)) {
      return behind;
    }
  }
  require_strided(result);
  if (!result.is_cpu()) {
    return result;
  }
  const Keys keys =
      (result.key_set() - Keys(c10::DispatchKey::AutocastCPU)).remove_backend(c10::BackendComponent::CPUBit) |
      Keys(c10::BackendComponent::PrivateUse1Bit) | Keys(c10::DispatchKey::AutocastPrivateUse1);
  return same_view(result, device_storage_of(result.storage()), keys);
}

// The kernel may have resized the alias: then its memory is the storage's from now on.
void Aliases::write_back_storage(const StoragePair& pair) {
  c10::StorageImpl* const cpu = pair.cpu.unsafeGetStorageImpl();
  c10::StorageImpl* const device = pair.device.unsafeGetStorageImpl();
  if (cpu->data() != device->data()) {
    c10::DataPtr data = taken_from(cpu);
    fresh_ranges_.push_back(range_of(data.get(), cpu->nbytes()));
    device->set_data_ptr_noswap(std::move(data));
  }
  if (cpu->nbytes() != device->nbytes()) {
    device->set_nbytes(cpu->nbytes());
  }
}

void Aliases::write_back() {
  for (const StoragePair& pair : storages_) {
    write_back_storage(pair);
  }
  for (const auto& [alias, behind] : tensors_) {
    c10::TensorImpl* const impl = behind.unsafeGetTensorImpl();
    const c10::Storage storage = device_storage_of(alias.storage());
    if (!storage.is_alias_of(behind.storage())) {
      impl->set_storage_keep_dtype(storage);
    }
    if (alias.sizes() != behind.sizes() || alias.strides() != behind.strides() ||
        alias.storage_offset() != behind.storage_offset()) {
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
}

}  // namespace actckpt::sim_device
