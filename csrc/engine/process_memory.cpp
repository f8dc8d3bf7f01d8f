#include "engine/process_memory.h"

#include <malloc.h>
#include <climits>

namespace actckpt {

bool fix_mmap_threshold(std::size_t bytes) noexcept {
#ifdef M_MMAP_THRESHOLD
  return bytes <= INT_MAX && mallopt(M_MMAP_THRESHOLD, static_cast<int>(bytes)) == 1;
#else
  (void)bytes;
  return false;
#endif
}

}  // namespace actckpt
