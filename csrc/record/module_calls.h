// Which call of which module runs an operator, and how many like it ran there before: the parts of a place
// (NOTE [ Places ] in actckpt/_text/places.py).
//
// Guarded by the GIL. One object per step, thread and nesting depth of regions. Unused if nobody needs places.
//
// Inspecting the frames of every operator would cost several percent of a region. So it is done while a region is new.
// Its first operator is always looked up. The rest is remembered by the first operator, the outermost module and the
// structure (`advance` in results.cpp). If a region leaves the known structures, it is looked up from there on, with
// calls counted anew, and from its start in all later calls. Two branches of one region with the same operators and
// shapes are not distinguished: both get the name of the one that ran first. If the first operator runs in no module,
// nothing is remembered.
//
// The frames of running calls, or of those that ran last, are held while frames are inspected. Calls are distinguished
// by their frames, and a freed frame's address may be reused by the next one.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/python.h"

namespace actckpt::replay {

// Facts about an operator (actckpt/_replay/operators.py). `id` is a hash of its name, so it is the same in every
// process.
struct OperatorFacts {
  py::object op;  // keeps the address valid
  std::uint64_t id = 0;
  long num_returned = 0;  // results that are no aliases of arguments
};

const OperatorFacts& facts_of(PyObject* op);

// Hashes of a text and of two ids: the same in every process.
std::uint64_t id_of(std::string_view text) noexcept;
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) noexcept;

// The call that runs an operator; `id` identifies module and call.
struct RunningCall {
  PyObject* module = nullptr;  // its name; never freed
  std::uint64_t module_id = 0;
  std::uint64_t id = 0;
  long long index = 0;
  long long occurrence = 0;
};

// Records that an operator runs now, after the operators that `structure` encodes. Its results are made in `running`
// until the next operator runs.
void note_operator(PyObject* calls, PyObject* op, std::uint64_t structure);
const RunningCall& running(PyObject* calls) noexcept;

// The key of a place in tables.
inline std::uint64_t place_id(const RunningCall& call, const OperatorFacts& facts, long long result) noexcept {
  const std::uint64_t operator_id = mixed(mixed(call.id, facts.id), static_cast<std::uint64_t>(call.occurrence));
  return mixed(operator_id, static_cast<std::uint64_t>(result));
}

// Records that a backward reads what the step saved.
void end_step(PyObject* calls) noexcept;

void add_calls_type(py::module_& module);

}  // namespace actckpt::replay
