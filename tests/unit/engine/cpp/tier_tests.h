// Tests of the tiers below pinned memory; each aborts where something is wrong.

#pragma once

#include <string>

namespace actckpt {

void test_threads_share_tiers(const std::string& folder);
void test_threads_over_a_failing_disk(const std::string& folder);
void test_close_during_copies(const std::string& folder);

}  // namespace actckpt
