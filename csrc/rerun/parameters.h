// The parameters of modules as a region's forward left them: whether a rerun still finds them so. And what else the
// modules have that reruns must know of: buffers and generators.
//
// A parameter that no operator saves (a bias, a weight whose input needs no gradient) changes what a
// rerun computes without any saved tensor showing it. A parameter or module that another one has
// taken the place of (`functional_call`) is put in its place for the rerun.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

#include "rerun/module_generators.h"

namespace actckpt {

namespace py = pybind11;

class Parameters {
 public:
  // Before the forward of `function`: a module, or its method that is `forward` or `__call__`, has parameters that are
  // known to be used and must not change. Of the module of another method, and of `others`, modules that may be
  // called, only what stands where is noted. Null: none.
  Parameters(PyObject* function, PyObject* others);

  // After it. A module that changes its parameters in its own forward is let alone.
  void forward_done();

  // Throws if a parameter was changed in place (`checks_versions`) or, unless that is allowed, is
  // another one now. Returns whether anything is, or a generator.
  bool check(bool checks_versions, bool may_be_replaced) const;

  // What is not where it was: (dict, key, what the forward left there); of generators what it found there, or
  // (dict, key) where it found nothing. Null where there is nothing.
  py::object replaced() const;

  // Modules that had buffers before the forward; null where there are none.
  const py::object& buffered() const noexcept { return buffered_; }

  // torch.Generators that modules had before the forward; null where there are none.
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

  // Forgets what was noted: nothing is checked any longer.
  void release();

 private:
  Parameters() = default;

  struct Entry {
    py::object key, value;
    long long version;  // -1: not checked
    py::object copy;    // of an inference tensor, which has no version; else null
    long long implementation;
  };
  // Entries of one module's dict of parameters or modules.
  struct Group {
    py::object module;
    PyObject* name;
    std::size_t end;  // of its entries; they begin where those before it end
  };

  void walk_roots(bool notes);
  void walk(PyObject* module, bool is_strict, bool notes);
  template <typename Visit>
  void for_each_module(PyObject* module, const Visit& visit) const;
  py::object displaced_generators() const;
  void note(PyObject* module, PyObject* name, PyObject* dict, bool is_strict);
  template <typename Visit>
  void for_each_entry(const Visit& visit) const;
  [[noreturn]] void raise_changed(PyObject* parameter, long long before, long long now) const;

  py::object root_;    // null: the function is neither a module nor a method of one
  py::object others_;  // null: there are none
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
