#include "record/module_calls.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "graph/objects.h"

namespace actckpt::replay {
namespace {

// One module call; outside of any call, the code that the region wraps.
struct Call {
  py::object frame;
  py::object module;
  py::object root;  // for an outermost call: the module relative to which names inside it are qualified
  py::object name;
  std::uint64_t name_id = 0;
  std::uint64_t id = 0;                                          // of name and index
  long long index = -1;                                          // -1: it has run no operator yet
  std::vector<std::pair<std::uint64_t, long long>> occurrences;  // by operator
};

struct State {
  std::vector<Call> stack;  // outermost first
  Call outside;
  std::unordered_map<std::uint64_t, long long> num_calls;  // by name
  RunningCall running;
  // For the open region: the call of its first operator, 0 before that; whether a later one was remembered; and whether
  // remembered calls are exhausted.
  std::uint64_t first = 0;
  bool was_remembered = false;
  bool is_looked_up = false;
  bool looks_up_all = false;  // remember nothing
};

// Calls by first operator and structure of a region; and the first operators of regions that left the known structures.
struct Remembered {
  std::unordered_map<std::uint64_t, RunningCall> calls;
  std::unordered_set<std::uint64_t> changing;
};

Remembered& remembered() {
  constexpr std::size_t kMaxCalls = 1 << 18;  // for programs whose shapes never repeat
  static auto* all = new Remembered();
  if (all->calls.size() > kMaxCalls) *all = Remembered();
  return *all;
}

struct CallsObject {
  PyObject_HEAD PyObject* weak_references;
  State* state;
  char is_over;
};

PyTypeObject* calls_type = nullptr;

CallsObject* calls_of(PyObject* self) { return reinterpret_cast<CallsObject*>(self); }

// The innermost frame, from `frame` outward, that runs a module's `__call__`; null if there is none.
py::object call_frame(py::object frame) {
  while (frame) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    if (code.ptr() == names().module_call_code) break;
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return frame;
}

py::object outer_call(const py::object& frame) {
  auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
  return call_frame(py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw))));
}

// The module whose `__call__` a frame runs.
py::object module_in(const py::object& frame) {
#if PY_VERSION_HEX >= 0x030c0000
  return owned(PyFrame_GetVar(reinterpret_cast<PyFrameObject*>(frame.ptr()), names().self_name));
#else
  const py::object locals = attribute(frame.ptr(), names().locals);
  py::object found = py::reinterpret_borrow<py::object>(PyDict_GetItem(locals.ptr(), names().self_name));
  PyDict_Clear(locals.ptr());  // a snapshot, which the frame would keep alive
  return found;
#endif
}

std::string_view text_of(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (data == nullptr) {  // a lone surrogate
    PyErr_Clear();
    return {static_cast<const char*>(PyUnicode_DATA(text)),
            static_cast<std::size_t>(PyUnicode_GET_LENGTH(text) * PyUnicode_KIND(text))};
  }
  return {data, static_cast<std::size_t>(size)};
}

// Makes a name immortal: it is cached by pointer.
void intern(py::object* name) {
  PyObject* text = name->release().ptr();
  PyUnicode_InternInPlace(&text);
  static auto* names = new std::unordered_set<PyObject*>();
  if (names->insert(text).second) Py_INCREF(text);
  *name = py::reinterpret_steal<py::object>(text);
}

// Qualified names of modules relative to the outermost module that ran last; recomputed when either is gone.
struct Named {
  py::object module;  // weak references
  py::object root;
  py::object name;
  std::uint64_t id = 0;
};

std::unordered_map<PyObject*, Named>& known_names() {
  constexpr std::size_t kMaxNames = 1 << 16;
  static auto* found = new std::unordered_map<PyObject*, Named>();
  if (found->size() > kMaxNames) found->clear();
  return *found;
}

const Named& named(PyObject* root, PyObject* module) {
  Named& entry = known_names()[module];
  if (entry.name && referent(entry.module.ptr()) == module && referent(entry.root.ptr()) == root) return entry;
  Named made;
  made.name = call_with(names().qualified_name, root, module);
  intern(&made.name);
  made.id = id_of(text_of(made.name.ptr()));
  made.module = py::reinterpret_steal<py::object>(PyWeakref_NewRef(module, nullptr));
  made.root = py::reinterpret_steal<py::object>(PyWeakref_NewRef(root, nullptr));
  if (!made.module || !made.root) throw py::error_already_set();
  Named& kept = known_names()[module];  // Python code ran in between: look it up again
  kept = std::move(made);
  return kept;
}

// Pops ended calls off the stack. The caller frees them last of all, since that may run any code.
std::vector<Call> cut(State* state, std::size_t size) {
  std::vector<Call> ended;
  while (state->stack.size() > size) {
    ended.push_back(std::move(state->stack.back()));
    state->stack.pop_back();
  }
  return ended;
}

// The number of calls on the stack down to `frame`, inclusive; 0 if it is on none.
std::size_t position(const State* state, const py::object& frame) {
  std::size_t size = state->stack.size();
  while (size > 0 && state->stack[size - 1].frame.ptr() != frame.ptr()) --size;
  return size;
}

// Pushes the call in `frame`, and the calls around it. Returns the calls that ended.
std::vector<Call> enter(State* state, const py::object& frame) {
  std::vector<py::object> entered;
  std::size_t size = 0;
  for (py::object outer = frame; outer; outer = outer_call(outer)) {
    size = position(state, outer);
    if (size > 0) break;
    entered.push_back(outer);
  }
  std::vector<Call> ended = cut(state, size);
  while (!entered.empty()) {
    Call call;
    call.frame = std::move(entered.back());
    entered.pop_back();
    state->stack.push_back(std::move(call));
  }
  return ended;
}

PyObject* module_of(Call* call) {
  if (!call->module) call->module = module_in(call->frame);
  return call->module.ptr();
}

// The module relative to which `module` is named inside `outermost`: `outermost` itself. In a backward, which runs
// reruns, it is the outermost module of the forward, which may be further outside.
py::object naming_module(PyObject* outermost, PyObject* module) {
  auto found = py::reinterpret_borrow<py::object>(outermost);
  const auto at = known_names().find(module);
  if (at == known_names().end() || !at->second.name || referent(at->second.module.ptr()) != module) return found;
  const auto known = py::reinterpret_borrow<py::object>(referent(at->second.root.ptr()));
  if (!known || known.ptr() == outermost) return found;
  return PyLong_AsLongLong(call(names().graph_task_id).ptr()) == -1 ? found : known;
}

// Determines the name of a call on the stack.
void identify(State* state, Call* call) {
  Call* front = &state->stack.front();
  if (!front->root) front->root = naming_module(module_of(front), module_of(call));
  const py::object root = front->root;
  const Named& found = named(root.ptr(), module_of(call));
  call->name = found.name;
  call->name_id = found.id;
}

long long count(Call* call, std::uint64_t op) {
  for (auto& [id, number] : call->occurrences) {
    if (id == op) return ++number;
  }
  call->occurrences.emplace_back(op, 0);
  return 0;
}

// A number that identifies an outermost module while it is alive.
std::uint64_t number_of(PyObject* root) {
  static auto* known = new std::unordered_map<PyObject*, std::pair<py::object, std::uint64_t>>();
  static std::uint64_t last = 0;
  const auto at = known->find(root);
  if (at != known->end() && referent(at->second.first.ptr()) == root) return at->second.second;
  auto reference = owned(PyWeakref_NewRef(root, nullptr));
  (*known)[root] = {std::move(reference), ++last};
  return last;
}

// Inspects the frames of the current operator.
void look_up(State* state, const OperatorFacts& facts) {
  std::vector<Call> ended;
  const py::object frame =
      call_frame(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame())));
  if (frame && (state->stack.empty() || state->stack.back().frame.ptr() != frame.ptr())) ended = enter(state, frame);
  Call* call = frame ? &state->stack.back() : &state->outside;
  if (call->index < 0) {
    if (frame) identify(state, call);
    call->index = state->num_calls[call->name_id]++;
    call->id = mixed(call->name_id, static_cast<std::uint64_t>(call->index));
  }
  state->running = {call->name.ptr(), call->name_id, call->id, call->index, count(call, facts.id)};
}

void note(State* state, const OperatorFacts& facts, std::uint64_t structure) {
  if (state->first == 0) {
    look_up(state, facts);
    const bool has_root = !state->stack.empty();
    state->first = mixed(state->running.id, has_root ? number_of(state->stack.front().root.ptr()) : 0);
    state->is_looked_up = state->looks_up_all || !has_root || remembered().changing.count(state->first) > 0;
    return;
  }
  const std::uint64_t key = mixed(mixed(state->first, structure), facts.id);
  Remembered& known = remembered();
  if (!state->is_looked_up) {
    const auto at = known.calls.find(key);
    if (at != known.calls.end()) {
      if (at->second.id != state->running.id) {
        long long& num_calls = state->num_calls[at->second.module_id];
        num_calls = std::max(num_calls, at->second.index + 1);
      }
      state->running = at->second;
      state->was_remembered = true;
      if (!state->stack.empty()) const std::vector<Call> ended = cut(state, 0);
      return;
    }
    state->is_looked_up = true;
    if (state->was_remembered) known.changing.insert(state->first);
  }
  look_up(state, facts);
  known.calls[key] = state->running;
}

// begin(where): a region opens; `where` names what it wraps.
PyObject* calls_begin(PyObject* self, PyObject* where) {
  return guarded([&] {
    State* state = calls_of(self)->state;
    const std::vector<Call> ended = cut(state, 0);
    Call call;
    if (state->outside.name.ptr() == where) {
      call.name = state->outside.name;
      call.name_id = state->outside.name_id;
    } else {
      call.name = py::reinterpret_borrow<py::object>(where);
      call.name_id = id_of(text_of(where));
      intern(&call.name);
    }
    state->outside = std::move(call);
    state->first = 0;
    state->was_remembered = state->is_looked_up = state->looks_up_all = false;
    Py_RETURN_NONE;
  });
}

// look_up_all(): frames determine the calls of all operators of the region.
PyObject* calls_look_up_all(PyObject* self, PyObject*) {
  calls_of(self)->state->looks_up_all = true;
  Py_RETURN_NONE;
}

// end(): the region closes.
PyObject* calls_end(PyObject* self, PyObject*) {
  return guarded([&] {
    const std::vector<Call> ended = cut(calls_of(self)->state, 0);
    Py_RETURN_NONE;
  });
}

PyObject* calls_new(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    auto* calls = allocated<CallsObject>(type);
    calls->state = new State();
    return reinterpret_cast<PyObject*>(calls);
  });
}

void calls_dealloc(PyObject* self) {
  py::error_scope pending;
  if (calls_of(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  delete std::exchange(calls_of(self)->state, nullptr);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef calls_methods[] = {{"begin", calls_begin, METH_O, nullptr},
                               {"end", calls_end, METH_NOARGS, nullptr},
                               {"look_up_all", calls_look_up_all, METH_NOARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};
PyMemberDef calls_members[] = {
    {"is_over", T_BOOL, offsetof(CallsObject, is_over), 0, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(CallsObject, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot calls_slots[] = {{Py_tp_new, reinterpret_cast<void*>(calls_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(calls_dealloc)},
                             {Py_tp_members, calls_members},
                             {Py_tp_methods, calls_methods},
                             {0, nullptr}};
PyType_Spec calls_spec = {"actckpt._C.Calls", sizeof(CallsObject), 0, Py_TPFLAGS_DEFAULT, calls_slots};

}  // namespace

std::uint64_t id_of(std::string_view text) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3ULL;
  return hash;
}

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) noexcept {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

const OperatorFacts& facts_of(PyObject* op) {
  static auto* found = new std::unordered_map<PyObject*, OperatorFacts>();
  const auto at = found->find(op);
  if (at != found->end()) return at->second;
  OperatorFacts facts;
  facts.op = py::reinterpret_borrow<py::object>(op);
  facts.id = id_of(text_of(attribute(op, names().name).ptr()));
  facts.num_returned = PyLong_AsLong(attribute(op, names().num_returned).ptr());
  if (facts.num_returned == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found->emplace(op, std::move(facts)).first->second;
}

void note_operator(PyObject* calls, PyObject* op, std::uint64_t structure) {
  note(calls_of(calls)->state, facts_of(op), structure);
}

const RunningCall& running(PyObject* calls) noexcept { return calls_of(calls)->state->running; }

void end_step(PyObject* calls) noexcept { calls_of(calls)->is_over = 1; }

void add_calls_type(py::module_& module) {
  calls_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&calls_spec));
  if (calls_type == nullptr) throw_pending();
  const auto as_tuple = [](const RunningCall& call) {
    return py::make_tuple(py::reinterpret_borrow<py::object>(call.module), call.index, call.occurrence);
  };
  module.def("running_call", [=](const py::handle& calls) { return as_tuple(running(calls.ptr())); });
  module.def("look_up_call", [=](const py::handle& calls, const py::handle& op) {
    State* state = calls_of(calls.ptr())->state;
    look_up(state, facts_of(op.ptr()));
    return as_tuple(state->running);
  });
  module.add_object("Calls", py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(calls_type)));
}

}  // namespace actckpt::replay
