// Which call of which module runs an operator, and how many like it ran there before: what makes a place
// (NOTE [ Places ] in actckpt/_text/places.py).
//
// Guarded by the GIL. One object per step, thread and depth of open regions. Nothing is looked at where nobody asks for
// places.
//
// To look at the frames of each operator costs several percent of a region. So it is done while a region is new: its
// first operator is always looked up, and the rest is remembered by that, by the outermost module and by the structure
// (`advance` in results.cpp). Where a region leaves the structures that are known it is looked up from there on, with
// calls counted anew, and from its start in all later calls. Two branches of one region with the same operators and
// shapes are not told apart: their places have the name of the one that ran first. Where the first operator runs in no
// module, nothing is remembered.
//
// While frames are looked at, those of the calls that run, or ran last, are held: two calls are told apart by their
// frames, and a frame that nobody holds may get the address of the next one.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/python.h"

namespace actckpt::replay {

// What is known of an operator, from its description (actckpt/_replay/operators.py). `id` is made of its name, so that
// it is the same in every process.
struct OperatorFacts {
  py::object op;  // keeps the address taken
  std::uint64_t id = 0;
  long num_returned = 0;  // results that are no aliases of arguments
};

const OperatorFacts& facts_of(PyObject* op);

// A hash of a text and of both: the same in every process.
std::uint64_t id_of(std::string_view text) noexcept;
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) noexcept;

// The call that runs an operator; `id` stands for module and call.
struct RunningCall {
  PyObject* module = nullptr;  // its name; never freed
  std::uint64_t module_id = 0;
  std::uint64_t id = 0;
  long long index = 0;
  long long occurrence = 0;
};

// Notes that an operator runs now, after what `structure` stands for. What it makes is made in `running` until the next
// one runs.
void note_operator(PyObject* calls, PyObject* op, std::uint64_t structure);
const RunningCall& running(PyObject* calls) noexcept;

// What stands for a place in tables.
inline std::uint64_t place_id(const RunningCall& call, const OperatorFacts& facts, long long result) noexcept {
  const std::uint64_t operator_id = mixed(mixed(call.id, facts.id), static_cast<std::uint64_t>(call.occurrence));
  return mixed(operator_id, static_cast<std::uint64_t>(result));
}

// Notes that a backward reads what the step saved.
void end_step(PyObject* calls) noexcept;

void add_calls_type(py::module_& module);

}  // namespace actckpt::replay
