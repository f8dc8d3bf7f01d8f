// The parameters of modules at the end of a region's forward, and whether they are unchanged in a rerun. Also the
// buffers, generators and training modes of these modules.
//
// A parameter that no operator saves (a bias, or a weight whose input needs no gradient) changes what a rerun computes,
// but no saved tensor shows that. A replaced parameter or module (`functional_call`) is put back for the rerun, and so
// is the mode: the model may have been switched to evaluation between forward and backward.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

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
  // whether anything was replaced, or a mode switched.
  bool check(bool checks_versions, bool may_be_replaced) const;

  // Replaced entries: (dict, key, what the forward left there; of modes, what it found). Null if nothing was replaced.
  py::object replaced() const;

  // Modules that had buffers before the forward; null if there are none.
  const py::object& buffered() const noexcept { return buffered_; }

  // torch.Generators among the attributes that modules had before the forward, also in lists, tuples and dicts, without
  // repeats; null if there are none.
  const py::object& generators() const noexcept { return generators_; }

  template <typename Visit>
  friend void for_each_reference(Parameters& parameters, const Visit& visit) {
    visit(parameters.root_.ptr());
    for (py::object* field : {&parameters.others_, &parameters.buffered_, &parameters.generators_}) {
      visit(field->ptr());
    }
    for (Mode& mode : parameters.modes_) {
      for (py::object* field : {&mode.attributes, &mode.value}) visit(field->ptr());
    }
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
  // The attributes of a module, and whether it was in training.
  struct Mode {
    py::object attributes, value;
  };
  // The entries of one module's dict of parameters or modules.
  struct Group {
    py::object module;
    PyObject* name;
    std::size_t end;  // of its entries; they start where those of the previous group end
  };

  void walk_roots(bool notes);
  void walk(PyObject* module, bool is_strict, bool notes);
  void note_mode(const py::object& attributes);
  void note_generators(PyObject* attributes);
  void add_generator(PyObject* value);
  bool is_mode_switched() const;
  void note(PyObject* module, PyObject* name, PyObject* dict, bool is_strict);
  template <typename Visit>
  void for_each_entry(const Visit& visit) const;
  [[noreturn]] void raise_changed(PyObject* parameter, long long before, long long now) const;

  py::object root_;    // null: the function is neither a module nor a module's method
  py::object others_;  // null: none
  bool is_root_called_ = false;
  py::object buffered_;
  py::object generators_;
  std::vector<Mode> modes_;
  long long sum_before_ = 0;
  long long sum_ = 0;
  std::vector<Group> groups_;
  std::vector<Entry> entries_;
};

void add_parameter_functions(py::module_& module);

}  // namespace actckpt
