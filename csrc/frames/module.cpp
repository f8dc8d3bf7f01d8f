// The extension module actckpt._frames: checkpointed regions and their saved tensors, and the hooks
// of offloading (csrc/hooks).
//
// No function here releases the GIL, since all of them handle Python objects; what blocks (a lock,
// the user's function) is called through Python, which releases it.
#include "frames/all_or_nothing.h"
#include "frames/exclusive.h"
#include "frames/frame.h"
#include "frames/generators.h"
#include "frames/held.h"
#include "frames/meter.h"
#include "frames/modes.h"
#include "frames/numerics.h"
#include "frames/parameters.h"
#include "frames/python.h"
#include "frames/refill.h"
#include "frames/region.h"
#include "frames/structure.h"
#include "frames/swap_lock.h"
#include "frames/task_end.h"
#include "replay/names.h"
#include "replay/needs.h"
#include "replay/objects.h"
#include "replay/pack.h"
#include "replay/paused.h"
#include "replay/record.h"
#include "replay/unpack.h"
#include "hooks/bytes.h"
#include "hooks/handles.h"
#include "hooks/reading.h"
#include "hooks/session.h"
#include "hooks/span.h"

PYBIND11_MODULE(_frames, module) {
  module.doc() = "Checkpointed regions and the tensors that they save.";
  actckpt::add_frame_types(module);
  actckpt::add_refill_type(module);
  actckpt::add_task_end_type();
  actckpt::add_held_types(module);
  actckpt::add_generator_types(module);
  actckpt::add_meter_type(module);
  actckpt::add_parameter_functions(module);
  actckpt::add_numerics_functions(module);
  actckpt::add_mode_functions(module);
  actckpt::add_exclusive_functions(module);
  actckpt::add_structure_type(module);
  actckpt::add_swap_functions(module);
  actckpt::add_all_or_nothing(module);
  actckpt::add_region_functions(module);
  actckpt::replay::add_replay_types(module);
  actckpt::replay::add_paused(module);
  actckpt::replay::add_record_functions(module);
  actckpt::replay::add_pack_functions(module);
  actckpt::replay::add_unpack_functions(module);
  actckpt::replay::add_needs_functions(module);
  module.def("connect_replay", actckpt::replay::connect_replay, pybind11::arg("names"),
             "Tell recording and replay what they need of Python and torch. Called once.");
  actckpt::add_bytes_type(module);
  actckpt::add_span_type(module);
  actckpt::add_reading_functions(module);
  actckpt::add_handle_types(module);
  actckpt::add_session_type(module);
  module.def("connect", actckpt::connect, pybind11::arg("names"),
             "Tell the extension what it needs of Python and torch. Called once.");
}
