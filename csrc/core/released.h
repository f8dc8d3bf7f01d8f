// Counts what a holder releases under memory pressure (actckpt/_core/pressure.py).
#pragma once

#include <vector>

#include "core/python.h"

namespace actckpt {

class Released {
 public:
  // `wanted`: the number of bytes requested, a Python int.
  explicit Released(PyObject* wanted);

  bool is_enough() const { return nbytes_ >= wanted_; }
  long long nbytes() const { return nbytes_; }

  // Releases tensors, and counts the storages that died: others may hold some of them. Freeing may run Python code.
  void free(std::vector<py::object> tensors);

  void add(long long nbytes) { nbytes_ += nbytes; }

 private:
  long long wanted_;
  long long nbytes_ = 0;
};

}  // namespace actckpt
