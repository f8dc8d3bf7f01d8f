// Reruns under way in this thread: offloading moves nothing in them.
#pragma once

namespace actckpt {

inline thread_local int num_open_reruns = 0;

inline bool is_in_rerun() noexcept { return num_open_reruns > 0; }

}  // namespace actckpt
