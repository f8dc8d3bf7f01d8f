// LSTM and GRU: torch takes accelerators to have fused cells. These are made of operators that autograd knows.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

namespace actckpt::sim_device {
namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

std::vector<Tensor> gates_of(const Tensor& gates, const Bias& bias, std::int64_t number) {
  const bool has_bias = bias.has_value() && bias->defined();
  return (has_bias ? gates + *bias : gates).chunk(number, 1);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const Bias& input_bias, const Bias& hidden_bias) {
  const std::vector<Tensor> input = gates_of(input_gates, input_bias, 4);
  const std::vector<Tensor> hidden = gates_of(hidden_gates, hidden_bias, 4);
  const Tensor next =
      (input[1] + hidden[1]).sigmoid() * cell + (input[0] + hidden[0]).sigmoid() * (input[2] + hidden[2]).tanh();
  return {(input[3] + hidden[3]).sigmoid() * next.tanh(), next, input_gates.new_empty({0})};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& state,
                                    const Bias& input_bias, const Bias& hidden_bias) {
  const std::vector<Tensor> input = gates_of(input_gates, input_bias, 3);
  const std::vector<Tensor> hidden = gates_of(hidden_gates, hidden_bias, 3);
  const Tensor proposed = (input[2] + hidden[2] * (input[0] + hidden[0]).sigmoid()).tanh();
  return {(state - proposed) * (input[1] + hidden[1]).sigmoid() + proposed, input_gates.new_empty({0})};
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
}

}  // namespace
}  // namespace actckpt::sim_device
