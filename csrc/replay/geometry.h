// Data type, sizes and strides of a tensor, read at once where torch offers that.
//
// torch 2.10 and later publish a table of C functions (`torch.Tensor.__dlpack_c_exchange_api__`, DLPack 1.3), one of
// which fills in a struct of plain numbers. Otherwise, and for tensors that it refuses, they are read one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "frames/python.h"

namespace actckpt::replay {

class Geometry {
 public:
  // Points into `tensor`: valid while it is alive and nobody changes its sizes in place. Throws what reading raises.
  explicit Geometry(PyObject* tensor);
  Geometry(const Geometry&) = delete;
  Geometry& operator=(const Geometry&) = delete;

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
};

// Takes the table of functions from its capsule. Null, or of a version that is not known: read one by one.
void connect_exchange(PyObject* capsule);

// A tuple of numbers, not seen by the garbage collector.
py::object tuple_of(const std::int64_t* numbers, int count);

}  // namespace actckpt::replay
