// Running reruns of this thread, during which nothing is offloaded; and the number of reruns in the process so far.
#pragma once

namespace actckpt {

inline thread_local int num_open_reruns = 0;
inline long long num_reruns = 0;  // guarded by the GIL

inline bool is_in_rerun() noexcept { return num_open_reruns > 0; }

}  // namespace actckpt
