// The parameters of modules at the end of a region's forward, and whether they are unchanged in a rerun. Also the
// buffers and generators of these modules.
//
// A parameter that no operator saves (a bias, or a weight whose input needs no gradient) changes what a rerun computes,
// but no saved tensor shows that. A replaced parameter or module (`functional_call`) is put back for the rerun.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

#include "rerun/module_generators.h"

namespace actckpt {

namespace py = pybind11;

class Parameters {
 public:
  // Before the forward of `function`. If that is a module, or its `forward` or `__call__`, its parameters are used and
  // must not change. For the module of another method, and for `others`, modules that may be called, only identities
  // are recorded. Null: none.
  Parameters(PyObject* function, PyObject* others);

  // After the forward. A module that changes its parameters in its own forward is ignored.
  void forward_done();

  // Throws if a parameter was changed in place (`checks_versions`) or, unless that is allowed, was replaced. Returns
  // whether anything, or a generator, was replaced.
  bool check(bool checks_versions, bool may_be_replaced) const;

  // Replaced entries: (dict, key, what the forward left there). For generators: what the forward found, or (dict, key)
  // if there was none. Null if nothing was replaced.
  py::object replaced() const;

  // Modules that had buffers before the forward; null if there are none.
  const py::object& buffered() const noexcept { return buffered_; }

  // torch.Generators that modules had before the forward; null if there are none.
  const py::object& generators() const noexcept { return generators_.all(); }

  template <typename Visit>
  friend void for_each_reference(Parameters& parameters, const Visit& visit) {
    for (py::object* field : {&parameters.root_, &parameters.others_, &parameters.buffered_}) visit(field->ptr());
    for_each_reference(parameters.generators_, visit);
    for (Group& group : parameters.groups_) visit(group.module.ptr());
    for (Entry& entry : parameters.entries_) {
      for (py::object* field : {&entry.key, &entry.value, &entry.copy}) visit(field->ptr());
    }
  }

  // Forgets what was recorded: nothing is checked any more.
  void release();

 private:
  Parameters() = default;

  struct Entry {
    py::object key, value;
    long long version;  // -1: not checked
    py::object copy;    // of an inference tensor, which has no version; else null
    long long implementation;
  };
  // The entries of one module's dict of parameters or modules.
  struct Group {
    py::object module;
    PyObject* name;
    std::size_t end;  // of its entries; they start where those of the previous group end
  };

  void walk_roots(bool notes);
  void walk(PyObject* module, bool is_strict, bool notes);
  void note(PyObject* module, PyObject* name, PyObject* dict, bool is_strict);
  template <typename Visit>
  void for_each_entry(const Visit& visit) const;
  [[noreturn]] void raise_changed(PyObject* parameter, long long before, long long now) const;

  py::object root_;    // null: the function is neither a module nor a module's method
  py::object others_;  // null: none
  bool is_root_called_ = false;
  py::object buffered_;
  ModuleGenerators generators_;
  long long sum_before_ = 0;
  long long sum_ = 0;
  std::vector<Group> groups_;
  std::vector<Entry> entries_;
};

void add_parameter_functions(py::module_& module);

}  // namespace actckpt
