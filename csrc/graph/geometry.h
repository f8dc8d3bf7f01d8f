// Data type, sizes and strides of a tensor, read at once where torch offers that.
//
// torch 2.10 and later publish a table of C functions (`torch.Tensor.__dlpack_c_exchange_api__`, DLPack 1.3), one of
// which fills in a struct of plain numbers. Otherwise, and for tensors that it refuses, they are read one by one. It
// reads the address too, so a tensor that shares its bytes until it is written to (`torch._lazy_clone`) gets its own.
#pragma once

#include <cstdint>
#include <vector>

#include "core/python.h"

namespace actckpt::replay {

class Geometry {
 public:
  // Reads at once if that can be had. What is read points into `tensor`: valid while it is alive and nobody changes its
  // sizes in place.
  explicit Geometry(PyObject* tensor) : is_known_(read_at_once(tensor)) {}
  Geometry(const Geometry&) = delete;
  Geometry& operator=(const Geometry&) = delete;

  // Whether it is known already: then the tensor is strided, and has a storage that can be read.
  bool is_known() const noexcept { return is_known_; }
  // Reads one by one what is not known; throws what reading raises.
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
  bool is_known_;  // the last: reading sets the others
};

// Takes the table of functions from its capsule. Null, or of a version that is not known: read one by one.
void connect_exchange(PyObject* capsule);

// A tuple of numbers, not seen by the garbage collector.
py::object tuple_of(const std::int64_t* numbers, int count);

}  // namespace actckpt::replay
