#include "core/saved_identity.h"

#include "core/extensions.h"
#include "core/python.h"
#include "core/reads.h"

namespace actckpt {
namespace {

// References of the hook's argument and of torch itself: with no more, nobody else holds the object.
constexpr Py_ssize_t kOwnReferences = 2;

py::object attributes_of(PyObject* tensor) { return attribute(tensor, names().dict); }

bool is_equal(const py::object& one, const py::object& other) {
  const int result = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
  if (result < 0) throw py::error_already_set();
  return result != 0;
}

}  // namespace

std::unique_ptr<SavedIdentity> SavedIdentity::of(PyObject* tensor) {
  if (Py_REFCNT(tensor) <= kOwnReferences || reads().requires_grad.is_true(tensor)) return nullptr;
  return std::unique_ptr<SavedIdentity>(new SavedIdentity(tensor));
}

SavedIdentity::SavedIdentity(PyObject* tensor) : version_(version_of(tensor)), must_be_alias_(false) {
  PyObject* reference = PyWeakref_NewRef(tensor, nullptr);
  if (reference == nullptr) throw py::error_already_set();
  reference_ = py::reinterpret_steal<py::object>(reference);
  const py::object attributes = attributes_of(tensor);
  if (PyDict_GET_SIZE(attributes.ptr()) > 0) {
    attributes_ = py::reinterpret_steal<py::object>(PyDict_Copy(attributes.ptr()));
  }
  must_be_alias_ = any_is_true(names().clears_saved);
}

bool SavedIdentity::is_same(PyObject* original, PyObject* alias) const {
  if (must_be_alias_ || Py_TYPE(original) != Py_TYPE(alias) || version_of(original) != version_ ||
      reads().requires_grad.is_true(original)) {
    return false;
  }
  if (!strided_storage_of(original)) return true;  // both consist of the same parts
  return reads().untyped_storage(original).ptr() == reads().untyped_storage(alias).ptr() &&
         reads().dtype(original).ptr() == reads().dtype(alias).ptr() &&
         is_equal(reads().shape(original), reads().shape(alias)) &&
         is_equal(reads().stride(original), reads().stride(alias)) &&
         reads().storage_offset.number(original) == reads().storage_offset.number(alias) &&
         reads().is_conj.is_true(original) == reads().is_conj.is_true(alias) &&
         reads().is_neg.is_true(original) == reads().is_neg.is_true(alias);
}

py::object SavedIdentity::resolved(py::object alias) const {
  const py::object original = call(reference_.ptr());
  if (!original.is_none() && is_same(original.ptr(), alias.ptr())) return original;
  return with_attributes(std::move(alias));
}

py::object SavedIdentity::with_attributes(py::object alias) const {
  const py::object original = call(reference_.ptr());
  const py::object attributes = original.is_none() ? attributes_ : attributes_of(original.ptr());
  if (attributes && PyDict_GET_SIZE(attributes.ptr()) > 0 &&
      PyDict_Merge(attributes_of(alias.ptr()).ptr(), attributes.ptr(), 0) != 0) {  // a subclass sets its own
    throw py::error_already_set();
  }
  return alias;
}

}  // namespace actckpt
