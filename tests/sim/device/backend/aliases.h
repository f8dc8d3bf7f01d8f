// Device tensors of one operator call as CPU tensors on the same bytes, and results as device tensors.
//
// Contract: a tensor has one alias, a storage one alias storage. A result that is an alias becomes the tensor behind
// it; a view of an alias storage becomes a view of the storage behind it; memory that the kernel allocated (see
// DeviceWorkspace) becomes the device's without a copy. `write_back` brings resized and replaced aliases back.
// Thread rule: one thread. Ownership: keeps storages alive while it lives.

#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "sim/device/machine/basics.h"

namespace actckpt::sim_device {

class Aliases {
 public:
  explicit Aliases(int device) : device_(device) {}

  at::Tensor to_cpu(const at::Tensor& tensor);
  c10::Storage to_cpu(const c10::Storage& storage);
  void write_back();
  at::Tensor to_device(const at::Tensor& result);

  // Memory that the call made part of results or of resized tensors.
  const std::vector<Range>& fresh() const { return fresh_ranges_; }

 private:
  struct StoragePair {
    c10::Storage cpu;
    c10::Storage device;
  };
  c10::Storage device_storage_of(const c10::Storage& cpu);
  c10::DataPtr taken_from(c10::StorageImpl* cpu) const;
  void write_back_storage(const StoragePair& pair);

  const int device_;
  std::vector<StoragePair> storages_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // alias, and what is behind it
  std::vector<Range> fresh_ranges_;
};

}  // namespace actckpt::sim_device
