#include "core/names.h"

#include <string>
#include <unordered_map>

namespace actckpt {

namespace py = pybind11;

Names the_names;

void intern_names() {
  Names& n = the_names;
#define ACTCKPT_INTERN(name, text) n.name = PyUnicode_InternFromString(text);
  ACTCKPT_INTERNED(ACTCKPT_INTERN)
#undef ACTCKPT_INTERN
  n.keyword_must = PyTuple_Pack(1, PyUnicode_InternFromString("must"));
  n.keywords_dtype_device = PyTuple_Pack(2, n.dtype, n.device);
}

void connect_names(const py::dict& given) {
  const std::unordered_map<std::string, PyObject**> fields = {
#define ACTCKPT_ENTRY(name) {#name, &the_names.name},
      ACTCKPT_CONNECTED(ACTCKPT_ENTRY)
#undef ACTCKPT_ENTRY
  };
  for (const auto& item : fields) {
    if (!given.contains(item.first.c_str())) throw py::key_error(item.first);
  }
  for (const auto& item : given) {
    const auto field = fields.find(item.first.cast<std::string>());
    if (field == fields.end()) throw py::key_error(item.first.cast<std::string>());
    *field->second = item.second.is_none() ? nullptr : item.second.inc_ref().ptr();
  }
}

}  // namespace actckpt
