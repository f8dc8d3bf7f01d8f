// The parameters of a module as a region's forward left them: whether a rerun still finds them so.
//
// A parameter that no operator saves (a bias, a weight whose input needs no gradient) changes what a
// rerun computes without any saved tensor showing it.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace actckpt {

namespace py = pybind11;

class Parameters {
 public:
  // Before the forward of `function`: a module, or the forward method of one. Others have no
  // parameters that are known to be used; nothing is noted of them.
  explicit Parameters(PyObject* function);

  // After it. A module that changes its parameters in its own forward is let alone.
  void forward_done();

  // Throws if a parameter was changed in place, or is another one now.
  void check() const;

 private:
  struct Noted {
    py::object parameter;
    long long version;
    py::object copy;  // of an inference tensor, which has no version; else null
  };

  py::object module_;  // null: nothing is noted
  long long sum_before_ = 0;
  std::vector<Noted> noted_;
};

void add_parameter_functions(py::module_& module);

}  // namespace actckpt
