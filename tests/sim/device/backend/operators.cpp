// Which kernels the device registers. Besides the fallback: what allocates, copies, names streams or draws numbers.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>
#include <string>

#include "sim/device/backend/aliases.h"
#include "sim/device/backend/allocators.h"
#include "sim/device/backend/devices.h"
#include "sim/device/backend/kernels.h"
#include "sim/device/machine/copies.h"
#include "sim/device/machine/memory.h"
#include "sim/device/machine/pinned.h"

namespace actckpt::sim_device {
namespace {

using at::Tensor;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  const Lock lock = lock_machine();
  device_memory().record_stream(lock, tensor.storage().data(), of_torch(lock, stream));
}

void run_copy_kernel(int device, const Tensor& target, const Tensor& source) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{target, source, false};
  run_cpu_kernel_on(device, op, &stack);
}

bool is_pinned(const Tensor& tensor) {
  const Lock lock = lock_machine();
  return tensor.is_cpu() && pinned_memory().contains(range_of(tensor.const_data_ptr(), tensor.nbytes()));
}

bool have_equal_bytes(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

void copy_late(Stream* stream, const Tensor& target, const Tensor& source) {
  const bool is_out = target.is_cpu();
  const Tensor& host = is_out ? target : source;
  Lock lock = lock_machine();
  streams().meddle(lock);
  give_copy(lock, stream,
            {is_out ? Direction::kToHost : Direction::kToDevice, target.mutable_data_ptr(), source.const_data_ptr(),
             source.nbytes(), is_out ? "a copy to pinned memory" : "a copy from pinned memory"});
  pinned_memory().record_use(lock, host.const_data_ptr(), stream);
}

// As CUDA's: on the stream of the source, between what both streams had and what the target's gets.
void copy_across(const Tensor& target, const Tensor& source) {
  Stream* const from = current_stream(source.device().index());
  Stream* const to = current_stream(target.device().index());
  {
    const Lock lock = lock_machine();
    streams().wait(lock, from, streams().record(lock, to));
  }
  run_copy_kernel(from->device, target, source);
  const Lock lock = lock_machine();
  streams().wait(lock, to, streams().record(lock, from));
}

// Late if the host side is pinned; a device tensor stands between where bytes differ.
bool copied_late(Stream* stream, const Tensor& target, const Tensor& source) {
  const Tensor& host = target.is_cpu() ? target : source;
  if (host.numel() == 0 || !is_pinned(host) || !host.is_non_overlapping_and_dense() || host.is_conj() ||
      host.is_neg() || target.sizes() != source.sizes()) {
    return false;
  }
  if (have_equal_bytes(target, source)) {
    copy_late(stream, target, source);
    return true;
  }
  const Tensor between = at::empty_like(host, host.options().device(torch_device(stream->device)));
  if (target.is_cpu()) {
    run_copy_kernel(stream->device, between, source);
    copy_late(stream, target, between);
  } else {
    copy_late(stream, between, source);
    run_copy_kernel(stream->device, target, between);
  }
  return true;
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_privateuseone() && source.is_privateuseone()) {
    if (self.device() != source.device()) {
      copy_across(self, source);
    } else {
      run_copy_kernel(self.device().index(), self, source);
    }
    return self;
  }
  const Tensor& on_device = self.is_cpu() ? source : self;
  Stream* const stream = current_stream(on_device.device().index());
  if (non_blocking && copied_late(stream, self, source)) {
    return self;
  }
  run_copy_kernel(stream->device, self, source);
  if (self.is_cpu() || !non_blocking) {
    synchronize_with_host(stream);
  }
  return self;
}

// What dropout is on the CPU, bit for bit, with the device's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  Tensor mask = at::empty_like(input, input.options().dtype(c10::kBool));
  if (!train.value_or(true)) {
    return {input.clone(), mask.fill_(true)};
  }
  mask.bernoulli_(1.0 - p);
  const double scale = p == 1.0 ? 0.0 : 1.0 / (1.0 - p);
  return {input.mul(mask).mul_(scale), mask};
}

// What the CPU chooses for tensors of these shapes.
std::int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                              const std::optional<Tensor>& mask, double dropout, bool is_causal,
                              std::optional<double> scale, bool gqa) {
  Aliases aliases(query.device().index());
  const auto on_cpu = [&](const Tensor& tensor) {
    Tensor alias = aliases.to_cpu(tensor).detach();
    alias.set_requires_grad(tensor.requires_grad());
    return alias;
  };
  std::optional<Tensor> mask_on_cpu;
  if (mask.has_value() && mask->defined()) {
    mask_on_cpu = on_cpu(*mask);
  }
  return at::_fused_sdp_choice(on_cpu(query), on_cpu(key), on_cpu(value), mask_on_cpu, dropout, is_causal, scale, gqa);
}

const std::set<std::string>& own_kernels() {
  static const std::set<std::string> names = {
      "empty.memory_format", "empty_strided",     "record_stream",         "copy_",
      "native_dropout",      "_fused_sdp_choice", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"};
  return names;
}

bool takes(const c10::FunctionSchema& schema, c10::TypeKind kind) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [&](const c10::Argument& argument) {
    c10::TypePtr type = argument.type();
    if (type->kind() == c10::TypeKind::OptionalType) {
      type = type->castRaw<c10::OptionalType>()->getElementType();
    }
    return type->kind() == kind;
  });
}

bool gives_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

// NOTE [ Explicit fallbacks ]: an operator with a composite kernel would be taken apart on the device where the CPU has
// a kernel of its own, or makes a choice (convolution, norms), and differ by an ulp. So the fallback is given to all
// that the CPU does not take apart; but not to factories, which have a device argument, to views, and to what draws
// numbers without naming a generator: their composite kernels are right, and end in operators that do name one.
bool needs_fallback(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  const bool has_cpu_kernel = op.hasKernelForDispatchKey(Key::CPU);
  if (!has_cpu_kernel) {
    const bool is_explicit = op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
                             op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional);
    const bool draws = op.hasTag(at::Tag::nondeterministic_seeded) && !takes(op.schema(), c10::TypeKind::GeneratorType);
    if (!is_explicit || draws || op.hasKernelForDispatchKey(Key::CompositeImplicitAutograd)) {
      return false;
    }
  }
  return !takes(op.schema(), c10::TypeKind::DeviceObjType) && !gives_view(op.schema());
}

void register_fallbacks(torch::Library* library) {
  const std::string aten = "aten::";
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const std::string full = c10::toString(name);
    const auto op = dispatcher.findSchema(name);
    if (op.has_value() && full.rfind(aten, 0) == 0 && own_kernels().count(full.substr(aten.size())) == 0 &&
        needs_fallback(*op)) {
      library->impl(full.c_str() + aten.size(), torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_cpu_kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("record_stream", &record_stream);
  library.impl("copy_", &copy);
  library.impl("native_dropout", &native_dropout);
  library.impl("_fused_sdp_choice", &choose_attention);
  register_fallbacks(&library);
}

}  // namespace
}  // namespace actckpt::sim_device

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &actckpt::sim_device::choose_attention)
}
