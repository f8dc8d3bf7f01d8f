#include "offload/sources.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "core/reads.h"

namespace actckpt {
namespace {

// Active watches. Storages by identity: a source holds its storage.
std::unordered_map<PyObject*, std::vector<SourceWatch*>>& watches() {
  static auto* all = new std::unordered_map<PyObject*, std::vector<SourceWatch*>>();
  return *all;
}

}  // namespace

SourceWatch::SourceWatch(PyObject* storage)
    : storage_(storage), address_(reads().data_ptr.number(storage)), nbytes_(reads().nbytes.number(storage)) {
  watches()[storage].push_back(this);
}

SourceWatch::~SourceWatch() {
  end();
  if (is_replaced_) Py_DECREF(storage_);
}

// Compares size and address: memory that grew may lie at its previous address.
bool SourceWatch::is_as_it_was() const {
  return reads().nbytes.number(storage_) == nbytes_ && reads().data_ptr.number(storage_) == address_;
}

PyObject* SourceWatch::replaced_storage() noexcept {
  if (is_replaced_) return storage_;
  if (storage_ == nullptr) return nullptr;
  py::error_scope pending;
  bool is_same = false;
  try {
    is_same = is_as_it_was();
  } catch (const std::exception&) {  // unknown: the current contents are the safe answer
  }
  if (is_same) return nullptr;
  PyObject* const storage = Py_NewRef(storage_);
  end();
  storage_ = storage;
  is_replaced_ = true;
  return storage_;
}

void SourceWatch::end() noexcept {
  if (is_replaced_ || storage_ == nullptr) return;
  const auto found = watches().find(storage_);
  auto& of_storage = found->second;
  of_storage.erase(std::find(of_storage.begin(), of_storage.end(), this));
  if (of_storage.empty()) watches().erase(found);
  storage_ = nullptr;
}

bool is_source(PyObject* storage) { return watches().count(storage) != 0; }

void end_sources(PyObject* storage) noexcept {
  for (auto found = watches().find(storage); found != watches().end(); found = watches().find(storage)) {
    SourceWatch* const watch = found->second.back();
    if (watch->replaced_storage() == nullptr) watch->end();
  }
}

}  // namespace actckpt
