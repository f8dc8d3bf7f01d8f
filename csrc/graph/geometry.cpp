#include "graph/geometry.h"

#include <cstddef>
#include <string>
#include <unordered_map>

#include "core/python.h"
#include "core/reads.h"
#include "graph/objects.h"

namespace actckpt::replay {
namespace {

// From dlpack.h, version 1.3; the layout is the same in all 1.x versions.
struct DlTensor {
  void* data;
  struct {
    std::int32_t type, id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeTable {
  std::uint32_t major, minor;
  ExchangeTable* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DlTensor* out);
  void* current_work_stream;
};

constexpr std::uint32_t kMajor = 1;
constexpr std::uint32_t kFirstMinor = 3;
constexpr std::uint8_t kIntCode = 0;
constexpr std::uint8_t kUIntCode = 1;
constexpr std::uint8_t kComplexCode = 5;

int (*exchange)(void*, DlTensor*) = nullptr;

// torch's dtype for a DLPack dtype, cached from the first tensor that has it; torch dtypes are immortal.
PyObject* dtype_of(const DlTensor& from, PyObject* tensor) {
  // torch exports sub-byte integers (`torch.int4`) as whole bytes: these are read one by one.
  const bool is_ambiguous = from.dtype.bits == 8 && (from.dtype.code == kIntCode || from.dtype.code == kUIntCode);
  if (is_ambiguous) return reads().dtype(tensor).ptr();
  static auto* known = new std::unordered_map<std::uint32_t, PyObject*>();
  const std::uint32_t key = from.dtype.code | from.dtype.bits << 8 | static_cast<std::uint32_t>(from.dtype.lanes) << 16;
  const auto at = known->find(key);
  if (at != known->end()) return at->second;
  return known->emplace(key, reads().dtype(tensor).release().ptr()).first->second;
}

// Whether DLPack may describe a tensor; does not call DLPack.
bool is_describable(PyObject* tensor) {
  return reads().layout(tensor).ptr() == names().strided && !reads().is_meta.is_true(tensor) &&
         !reads().is_quantized.is_true(tensor) && !reads().is_nested.is_true(tensor);
}

void append_numbers(const py::object& tuple, std::vector<std::int64_t>* numbers) {
  for (const py::handle item : py::reinterpret_borrow<py::sequence>(tuple))
    numbers->push_back(item.cast<std::int64_t>());
}

}  // namespace

const Geometry& Geometry::of(PyObject* tensor) {
  if (!is_known_) read_one_by_one(tensor);
  is_known_ = true;
  return *this;
}

bool Geometry::read_at_once(PyObject* tensor) {
  if (exchange == nullptr || !is_plain_tensor(tensor)) return false;
  // A refusal costs torch milliseconds, for the text of its error. After the first one, tensors that would be refused
  // are not tried again.
  static bool has_refused = false;
  if (has_refused && !is_describable(tensor)) return false;
  DlTensor found;
  if (exchange(tensor, &found) != 0) {
    PyErr_Clear();  // DLPack cannot describe it
    has_refused = true;
    return false;
  }
  dtype_ = dtype_of(found, tensor);
  is_complex_ = found.dtype.code == kComplexCode;
  num_dims_ = found.ndim;
  sizes_ = found.shape;
  strides_ = found.strides;
  return true;
}

void Geometry::read_one_by_one(PyObject* tensor) {
  dtype_ = reads().dtype(tensor).ptr();
  is_complex_ = is_true(dtype_, names().is_complex);
  append_numbers(reads().shape(tensor), &own_);
  num_dims_ = static_cast<int>(own_.size());
  append_numbers(reads().stride(tensor), &own_);
  if (own_.size() != 2 * static_cast<std::size_t>(num_dims_)) {  // a subclass may report anything
    throw py::value_error("a tensor of type " + std::string(Py_TYPE(tensor)->tp_name) + " says that it has " +
                          std::to_string(num_dims_) + " dimensions, but its strides are " +
                          std::to_string(own_.size() - num_dims_) + ". Its `shape` and `stride()` must agree.");
  }
  sizes_ = own_.data();
  strides_ = own_.data() + num_dims_;
}

void connect_exchange(PyObject* capsule) {
  exchange = nullptr;
  if (capsule == nullptr || !PyCapsule_IsValid(capsule, "dlpack_exchange_api")) return;
  const auto* table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (table->major == kMajor && table->minor >= kFirstMinor) exchange = table->dltensor_from_py_object_no_sync;
}

py::object tuple_of(const std::int64_t* numbers, int count) {
  auto tuple = owned(untracked(PyTuple_New(count)));
  for (int i = 0; i < count; ++i) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(tuple.ptr(), i, number);
  }
  return tuple;
}

}  // namespace actckpt::replay
