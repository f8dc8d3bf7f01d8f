// Dtype, sizes and strides of a tensor, read in one call where torch offers that.
//
// torch 2.10 and later publish a table of C functions (`torch.Tensor.__dlpack_c_exchange_api__`, DLPack 1.3); one of
// them fills in a struct of numbers. Otherwise, and for tensors that it refuses, the attributes are read one by one.
// The call reads the data pointer too, so a copy-on-write tensor (`torch._lazy_clone`) is materialized.
#pragma once

#include <cstdint>
#include <vector>

#include "core/python.h"

namespace actckpt::replay {

class Geometry {
 public:
  // Reads in one call if possible. What was read points into `tensor`: valid while it is alive and its sizes are not
  // changed in place.
  explicit Geometry(PyObject* tensor) : is_known_(read_at_once(tensor)) {}
  Geometry(const Geometry&) = delete;
  Geometry& operator=(const Geometry&) = delete;

  // Whether it was read already: then the tensor is strided and has a readable storage.
  bool is_known() const noexcept { return is_known_; }
  // Reads the attributes one by one if necessary; throws what reading raises.
  const Geometry& of(PyObject* tensor);

  PyObject* dtype() const noexcept { return dtype_; }  // borrowed
  bool is_complex() const noexcept { return is_complex_; }
  int num_dims() const noexcept { return num_dims_; }
  const std::int64_t* sizes() const noexcept { return sizes_; }
  const std::int64_t* strides() const noexcept { return strides_; }

 private:
  bool read_at_once(PyObject* tensor);
  void read_one_by_one(PyObject* tensor);

  PyObject* dtype_ = nullptr;
  bool is_complex_ = false;
  int num_dims_ = 0;
  const std::int64_t* sizes_ = nullptr;
  const std::int64_t* strides_ = nullptr;
  std::vector<std::int64_t> own_;
  bool is_known_;  // last member: reading sets the others
};

// Takes the table of functions from its capsule. Null, or an unknown version: read one by one.
void connect_exchange(PyObject* capsule);

// A tuple of numbers that the garbage collector does not track.
py::object tuple_of(const std::int64_t* numbers, int count);

}  // namespace actckpt::replay
