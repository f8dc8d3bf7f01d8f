#include "offload/orders.h"

#include <algorithm>
#include <map>
#include <utility>

namespace actckpt {
namespace {

constexpr std::size_t kMaxOrders = 64;

struct Learnt {
  std::vector<std::size_t> places;
  long long noted_at = 0;
};

using Orders = std::map<std::vector<long long>, Learnt>;

Orders& orders() {
  static auto* all = new Orders();
  return *all;
}

}  // namespace

const std::vector<std::size_t>* learnt_order(const std::vector<long long>& sizes) {
  const auto found = orders().find(sizes);
  return found == orders().end() ? nullptr : &found->second.places;
}

void note_order(const std::vector<long long>& sizes, std::vector<std::size_t> places) {
  static long long num_noted = 0;
  orders()[sizes] = {std::move(places), ++num_noted};
  if (orders().size() <= kMaxOrders) return;
  orders().erase(std::min_element(orders().begin(), orders().end(), [](const auto& one, const auto& other) {
    return one.second.noted_at < other.second.noted_at;
  }));
}

}  // namespace actckpt
