// What the containers and objects hold that a region's function and arguments lead to: their state as the
// forward found it, for its reruns.
//
// See NOTE [ Found by the forward ] in actckpt/_rerun/object_state.py for the rules. Identities are compared
// and put back, never the contents of tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <unordered_set>
#include <utility>
#include <vector>

namespace actckpt {

namespace py = pybind11;

// One container, the attributes of one object, or the global variables that one function names.
struct Container {
  enum class Kind { kList, kDict, kOrderedDict, kSet, kDeque, kAttributes, kSlots, kGlobals };

  Kind kind;
  py::object object;
  py::object found;  // a dict for kinds with keys, else a list
  // Set by the forward itself: what a rerun sets again. Keys only, never what they lead to now,
  // which may own the region.
  bool is_changed = false;
  py::object changed_keys;
};

// What containers held when a rerun began; given back when it ends.
struct Replaced {
  std::vector<std::pair<std::size_t, py::object>> contents;  // by index of the container

  void release() { const auto released = std::exchange(contents, {}); }
};

template <typename Visit>
void for_each_reference(Replaced& replaced, const Visit& visit) {
  for (auto& entry : replaced.contents) visit(entry.second.ptr());
}

class Structure {
 public:
  // Notes what can be reached from `roots`, but not what only `left_alone` lead to. `rebuilt`: ids of
  // containers that reruns get anew.
  Structure(const py::tuple& roots, const py::set& rebuilt, const py::list& left_alone);

  // After the forward: notes which containers it changed itself. Returns what is held from now on in
  // the place of tensors that it displaced, by id.
  py::dict forward_done();

  // Gives the containers what the forward found, and returns what they held.
  Replaced swap_in() const;
  void put_back(const Replaced& replaced) const;

  // Whether an attribute or global is, in a rerun, not as the forward both found and left it: the
  // function is about to change it back.
  bool is_half_done() const;

  // Names where a tensor stands in what was found, for errors.
  py::str place_of(const py::object& tensor) const;

  bool is_empty() const noexcept { return containers_.empty(); }
  // Tensors and generators in objects, which are not held here any longer.
  py::list take_tensors() { return std::exchange(tensors_, py::list()); }
  py::list take_generators() { return std::exchange(generators_, py::list()); }
  const py::list& modules() const noexcept { return modules_; }

  template <typename Visit>
  friend void for_each_reference(Structure& structure, const Visit& visit) {
    for (Container& container : structure.containers_) {
      for (py::object* field : {&container.object, &container.found, &container.changed_keys}) visit(field->ptr());
    }
    for (py::list* field : {&structure.tensors_, &structure.generators_, &structure.modules_}) visit(field->ptr());
  }

  // Forgets what was noted: nothing is given back any longer.
  void release();

 private:
  friend class Walk;

  void let_go(Container& container, const py::object& now, py::dict& kept) const;

  std::vector<Container> containers_;
  py::list tensors_;     // in objects
  py::list generators_;  // in objects
  py::list modules_;
  std::unordered_set<PyObject*> roots_;  // owned by the region as long as this is
};

void add_structure_type(py::module_& module);

}  // namespace actckpt
