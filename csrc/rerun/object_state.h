// State of the containers and objects reachable from a region's function and arguments, recorded at the forward and
// restored for reruns.
//
// See NOTE [ Object state ] in actckpt/_rerun/object_state.py. Object identities are compared and restored, never
// tensor contents.
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
  // Set by the forward itself; a rerun sets it again. Keys only, never the values that it left, which may own the
  // region.
  bool is_changed = false;
  py::object changed_keys;
};

// Contents of containers at the start of a rerun, put back at its end.
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
  // Records what is reachable from `roots`, except what is reachable only through `left_alone`. `rebuilt`: ids of
  // containers that are rebuilt for reruns.
  Structure(const py::tuple& roots, const py::set& rebuilt, const py::list& left_alone);

  // After the forward: records which containers it changed itself. Returns the replacements of tensors that it
  // displaced, by id; these are held from now on.
  py::dict forward_done();

  // Sets the contents that the forward found, and returns the current ones.
  Replaced swap_in() const;
  void put_back(const Replaced& replaced) const;

  // Whether an attribute or global differs, in a rerun, from what the forward both found and left: the function is
  // about to change it back.
  bool is_half_done() const;

  // Where a tensor was found, for errors.
  py::str place_of(const py::object& tensor) const;

  bool is_empty() const noexcept { return containers_.empty(); }
  // Tensors and generators in objects; no longer held here.
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

  // Forgets what was recorded: nothing is restored any more.
  void release();

 private:
  friend class Walk;

  void let_go(Container& container, const py::object& now, py::dict& kept) const;

  std::vector<Container> containers_;
  py::list tensors_;     // in objects
  py::list generators_;  // in objects
  py::list modules_;
  std::unordered_set<PyObject*> roots_;  // the region owns them for the lifetime of this
};

void add_structure_type(py::module_& module);

}  // namespace actckpt
