// The extension module actckpt._C: checkpointed regions and their saved tensors, the offload hooks, and the engine.
//
// Functions of regions and hooks do not release the GIL, since all of them handle Python objects. What blocks (a lock,
// the user's function) is called through Python, which releases it. Functions of the engine document what they do.
#include "bind/engine.h"
#include "core/all_or_nothing.h"
#include "core/generators.h"
#include "core/meter.h"
#include "core/modes.h"
#include "core/names.h"
#include "core/numerics.h"
#include "core/reads.h"
#include "core/swap_lock.h"
#include "core/task_end.h"
#include "graph/geometry.h"
#include "graph/needs.h"
#include "graph/objects.h"
#include "graph/python_types.h"
#include "graph/window.h"
#include "offload/bytes.h"
#include "offload/handles.h"
#include "offload/owned_memory.h"
#include "offload/reading.h"
#include "offload/session.h"
#include "offload/span.h"
#include "offload/store.h"
#include "record/arguments.h"
#include "record/candidates.h"
#include "record/closing.h"
#include "record/decide.h"
#include "record/dispatch.h"
#include "record/known_storages.h"
#include "record/module_calls.h"
#include "record/pack.h"
#include "record/paused.h"
#include "record/results.h"
#include "replay/depth_first.h"
#include "replay/execute.h"
#include "replay/unpack.h"
#include "rerun/frame.h"
#include "rerun/held.h"
#include "rerun/parameters.h"
#include "rerun/recomputed_values.h"
#include "rerun/region.h"

namespace {

// The only connection between the rooms and Python: distributes the names to the rooms that use them.
void connect(const pybind11::dict& given) {
  actckpt::connect_names(given);
  const actckpt::Names& names = actckpt::names();
  actckpt::connect_reads(names.tensor_type, names.parameter_type, names.storage_type);
  actckpt::replay::connect_exchange(names.exchange_api);
}

}  // namespace

// The extension relies on the GIL. The argument also fills the macro's variadic parameter.
#if PYBIND11_VERSION_HEX >= 0x03010000
#define ACTCKPT_GIL_USED pybind11::mod_gil_used()
#else
#define ACTCKPT_GIL_USED pybind11::mod_gil_not_used(false)
#endif

PYBIND11_MODULE(_C, module, ACTCKPT_GIL_USED) {
  module.doc() = "Checkpointed regions, the tensors that they save, and the offload engine.";
  actckpt::intern_names();
  actckpt::add_store_type(module);  // stores of the engine derive from it
  actckpt::python::bind_engine(module);
  actckpt::add_frame_types(module);
  actckpt::add_recomputed_type(module);
  actckpt::add_task_end(module);
  actckpt::add_held_types(module);
  actckpt::add_generator_types(module);
  actckpt::add_meter_type(module);
  actckpt::add_parameter_functions(module);
  actckpt::add_numerics_functions(module);
  actckpt::add_mode_functions(module);
  actckpt::add_read_functions(module);
  actckpt::add_swap_functions(module);
  actckpt::add_all_or_nothing(module);
  actckpt::add_region_functions(module);
  actckpt::replay::add_graph_types(module);
  actckpt::replay::add_region_types(module);
  actckpt::replay::add_calls_type(module);
  actckpt::replay::add_paused(module);
  actckpt::replay::add_known_storage_functions(module);
  actckpt::replay::add_argument_functions(module);
  actckpt::replay::add_result_functions(module);
  actckpt::replay::add_dispatch_functions(module);
  actckpt::replay::add_window_functions(module);
  actckpt::replay::add_execute_functions(module);
  actckpt::replay::add_candidate_functions(module);
  actckpt::replay::add_decide_functions(module);
  actckpt::replay::add_pack_functions(module);
  actckpt::replay::add_closing_functions(module);
  actckpt::replay::add_unpack_functions(module);
  actckpt::replay::add_needs_functions(module);
  actckpt::replay::add_order_functions(module);
  actckpt::add_bytes_type(module);
  actckpt::add_owned_functions(module);
  actckpt::add_span_type(module);
  actckpt::add_reading_functions(module);
  actckpt::add_handle_types(module);
  actckpt::add_session_type(module);
  module.def("connect", connect, pybind11::arg("names"),
             "Tell the extension what it needs of Python and torch: actckpt/_bind.py. Called once.");
}
