#include "record/candidates.h"

#include <utility>
#include <vector>

#include "core/python.h"
#include "core/reads.h"
#include "graph/least_held.h"
#include "graph/lineage.h"

namespace actckpt::replay {
namespace {

// Examinations wait until the held bytes have grown by one part in kGrowth, and the number of values by one part in
// kGrowthOfNumber of those that the last examination looked at.
constexpr long long kGrowth = 16;
constexpr long long kGrowthOfNumber = 128;

// Candidates, each held for the time of the decision.
using CandidateList = std::vector<py::object>;

std::vector<ValueObject*> as_values(const CandidateList& candidates) {
  std::vector<ValueObject*> values;
  for (const py::object& candidate : candidates) values.push_back(as_value(candidate));
  return values;
}

void end_late_audit(TapeObject* tape, ValueObject* value, bool is_dropped) {
  PyObject* method = is_dropped ? names().audit_late : names().leave_out_audit;
  call_method_with(reinterpret_cast<PyObject*>(tape), method, as_object(value));
}

// Takes the candidates that some saved tensor needs and whose bytes are nowhere else.
CandidateList take_undecided(TapeObject* tape) {
  const py::list candidates = py::reinterpret_borrow<py::list>(tape->candidates);
  assign(tape->candidates, py::list().ptr());
  CandidateList undecided;
  for (const py::handle candidate : candidates) {
    ValueObject* value = as_value(candidate);
    if (is_none(value->candidate_tensor)) continue;
    if (!is_available(value) && (has_saved_tensors(value) || value->is_needed != 0)) {
      undecided.push_back(py::reinterpret_borrow<py::object>(candidate));
      continue;
    }
    assign(value->candidate_tensor, Py_None);
    end_late_audit(tape, value, is_available(value));
  }
  return undecided;
}

void keep(TapeObject* tape, ValueObject* value) {
  assign(value->held, value->candidate_tensor);
  assign(value->candidate_tensor, Py_None);
  assign(value->step, Py_None);
  append(tape->holding, as_object(value));
  end_late_audit(tape, value, false);
  if (is_none(value->entry)) return;
  auto* entry = reinterpret_cast<EntryObject*>(value->entry);
  assign(entry->action, names().keep);
  assign(entry->why, names().why_larger);
}

// Drops those of `undecided` that the minimum cut drops; returns the others.
CandidateList drop(TapeObject* tape, const CandidateList& undecided) {
  long long num_walked = 0;
  const std::vector<char> is_kept = kept_of(as_values(undecided), &num_walked);
  tape->num_examined += num_walked;
  CandidateList kept, dropped;
  for (std::size_t i = 0; i < undecided.size(); ++i) (is_kept[i] != 0 ? kept : dropped).push_back(undecided[i]);
  // While dropped values are marked as needed, what will be kept counts as held: nothing is replayed beyond it.
  for (ValueObject* value : as_values(kept)) assign(value->held, value->candidate_tensor);
  for (ValueObject* value : as_values(dropped)) {
    assign(value->candidate_tensor, Py_None);
    value->is_needed = 0;  // it may have been, as a candidate
    mark_needed(value);
  }
  for (ValueObject* value : as_values(kept)) assign(value->held, Py_None);
  for (ValueObject* value : as_values(dropped)) end_late_audit(tape, value, true);
  return kept;
}

void decide_candidates(TapeObject* tape, bool is_last) {
  const CandidateList kept = drop(tape, take_undecided(tape));
  const std::vector<char> is_decided =
      is_last ? std::vector<char>(kept.size(), 1) : frees_leaves(tape, as_values(kept));
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (is_decided[i] != 0) {
      keep(tape, as_value(kept[i]));
    } else {
      append(tape->candidates, kept[i].ptr());
    }
  }
}

// Whether to examine what the region holds. Growth by number bounds the time of all examinations: it is linear.
bool has_grown(const TapeObject* tape) {
  const long long least_bytes = PyLong_AsLongLong(names().least_growth_bytes);
  if (least_bytes == 0) return tape->new_held_bytes > 0;
  return tape->new_held_bytes >= tape->held_bytes / kGrowth + least_bytes &&
         tape->num_values - tape->values_at_examination >= tape->num_examined / kGrowthOfNumber;
}

// Forgets storages that are gone, and with them what no handle leads to. The last go first: they hold earlier ones.
void forget_dead_storages(TapeObject* tape) {
  std::vector<py::object> dead;
  PyObject *key, *known;
  Py_ssize_t position = 0;
  while (PyDict_Next(tape->storages, &position, &key, &known) != 0) {
    if (referent(reinterpret_cast<KnownStorageObject*>(known)->storage) == nullptr) {
      dead.push_back(py::reinterpret_borrow<py::object>(key));
    }
  }
  for (auto key_of_dead = dead.rbegin(); key_of_dead != dead.rend(); ++key_of_dead) {
    PyObject* still_known = PyDict_GetItem(tape->storages, key_of_dead->ptr());
    if (still_known == nullptr) continue;
    if (referent(reinterpret_cast<KnownStorageObject*>(still_known)->storage) != nullptr) continue;
    if (PyDict_DelItem(tape->storages, key_of_dead->ptr()) != 0) throw py::error_already_set();
  }
}

// Forgets a value that only the list `holding` refers to: no step and no saved tensor does, and its memory is unshared.
// Returns whether it did.
bool forget_unused(TapeObject* tape, PyObject* item) {
  auto* value = reinterpret_cast<ValueObject*>(item);
  if (Py_REFCNT(item) > 2 || !is_unshared(value)) return false;  // references of the list and of the known storage
  const py::object storage = reads().untyped_storage(value->held);
  const auto key = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(storage.ptr()));
  PyObject* known = PyDict_GetItem(tape->storages, key.ptr());
  if (known == nullptr || reinterpret_cast<KnownStorageObject*>(known)->value != item) return false;
  if (PyDict_DelItem(tape->storages, key.ptr()) != 0) throw py::error_already_set();
  return true;
}

// Releases kept values that nothing refers to. Returns the bytes of those that stay, without parameters.
long long release_unused_of(TapeObject* tape) {
  // What is released may run code of the program that records: it finds a list of its own.
  const py::object holding = py::reinterpret_borrow<py::object>(tape->holding);
  assign(tape->holding, py::list().ptr());
  long long held_bytes = 0;
  std::vector<PyObject*> used;
  for (Py_ssize_t i = PyList_GET_SIZE(holding.ptr()) - 1; i >= 0; --i) {  // later values hold earlier ones
    PyObject* item = PyList_GET_ITEM(holding.ptr(), i);
    if (forget_unused(tape, item)) {
      if (PyList_SetItem(holding.ptr(), i, Py_NewRef(Py_None)) != 0) throw py::error_already_set();
      continue;
    }
    used.push_back(item);
    const auto* value = reinterpret_cast<ValueObject*>(item);
    if (value->is_parameter == 0) held_bytes += value->nbytes;
  }
  const py::list later = py::reinterpret_borrow<py::list>(tape->holding);
  assign(tape->holding, py::list().ptr());
  for (auto item = used.rbegin(); item != used.rend(); ++item) append(tape->holding, *item);
  for (const py::handle item : later) append(tape->holding, item.ptr());
  return held_bytes;
}

}  // namespace

void add_candidate(TapeObject* tape, ValueObject* value, PyObject* tensor) {
  assign(value->candidate_tensor, tensor);
  append(tape->candidates, as_object(value));
  tape->new_held_bytes += value->nbytes;
}

void release_unused(TapeObject* tape) {
  if (!has_grown(tape)) return;
  tape->new_held_bytes = 0;
  tape->values_at_examination = tape->num_values;
  tape->num_examined = PyDict_GET_SIZE(tape->storages) + PyList_GET_SIZE(tape->holding);
  forget_dead_storages(tape);
  if (PyList_GET_SIZE(tape->candidates) > 0) decide_candidates(tape, false);
  tape->held_bytes = release_unused_of(tape);
  for (const py::handle candidate : py::reinterpret_borrow<py::list>(tape->candidates)) {
    tape->held_bytes += as_value(candidate)->nbytes;
  }
}

void add_candidate_functions(py::module_& module) {
  module.def("decide_candidates", [](const py::handle& tape) { decide_candidates(as_tape(tape), true); });
}

}  // namespace actckpt::replay
