#include "offload/sources.h"

#include <unordered_map>

#include "core/reads.h"

namespace actckpt {
namespace {

// Active watches of each storage, by identity: a source holds its storage.
std::unordered_map<PyObject*, int>& num_watches() {
  static auto* all = new std::unordered_map<PyObject*, int>();
  return *all;
}

}  // namespace

SourceWatch::SourceWatch(PyObject* storage)
    : storage_(storage), address_(reads().data_ptr.number(storage)), nbytes_(reads().nbytes.number(storage)) {
  ++num_watches()[storage];
}

// Compares size and address: memory that grew may lie at its previous address.
bool SourceWatch::is_replaced() noexcept {
  if (storage_ == nullptr || is_replaced_) return is_replaced_;
  py::error_scope pending;
  try {
    is_replaced_ = reads().nbytes.number(storage_) != nbytes_ || reads().data_ptr.number(storage_) != address_;
  } catch (const std::exception&) {
    is_replaced_ = true;  // unknown
  }
  return is_replaced_;
}

void SourceWatch::end() noexcept {
  if (storage_ == nullptr) return;
  is_replaced();
  const auto found = num_watches().find(storage_);
  if (--found->second == 0) num_watches().erase(found);
  storage_ = nullptr;
}

bool is_source(PyObject* storage) { return num_watches().count(storage) != 0; }

}  // namespace actckpt
