#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "sim/device/backend/aliases.h"
#include "sim/device/backend/allocators.h"
#include "sim/device/backend/devices.h"
#include "sim/device/backend/generator.h"
#include "sim/device/backend/kernels.h"
#include "sim/device/machine/checker.h"

namespace actckpt::sim_device {
namespace {

using torch::jit::Stack;

// What the schema of an operator says.
struct Facts {
  const char* name;               // without "aten::" and overload
  bool touches_no_bytes = false;  // views, and questions about shapes
  bool tells_host = false;        // its result is a value of the host
  bool takes_any_device = false;
  bool counts_versions = false;    // its kernel does: autograd leaves it to the kernels that lists of tensors run on
  std::vector<bool> writes;        // by argument
  std::vector<bool> is_generator;  // by argument
};

bool is_generator(const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (type->kind() == c10::TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool gives_views(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() &&
         std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
           return result.alias_info() != nullptr && !result.alias_info()->isWrite();
         });
}

bool gives_no_tensor(const c10::FunctionSchema& schema) {
  return std::none_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

Facts facts_from(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t colons = schema.name().rfind(':');
  const std::string name = colons == std::string::npos ? schema.name() : schema.name().substr(colons + 1);
  Facts facts;
  facts.name = interned(name);
  for (const c10::Argument& argument : schema.arguments()) {
    facts.writes.push_back(is_written(argument));
    facts.is_generator.push_back(is_generator(argument));
  }
  const bool writes = std::find(facts.writes.begin(), facts.writes.end(), true) != facts.writes.end();
  const bool is_question = gives_no_tensor(schema) && !writes;
  facts.tells_host = name == "_local_scalar_dense" || name == "equal";
  facts.touches_no_bytes = gives_views(schema) || (is_question && !facts.tells_host) || name == "_unsafe_view" ||
                           name == "set_" || (op.hasTag(at::Tag::inplace_view) && name != "resize_");
  facts.takes_any_device = starts_with(name, "index") || starts_with(name, "_index") || name == "_unsafe_index" ||
                           name == "copy_" || starts_with(name, "_foreach_copy") || starts_with(name, "_copy_from");
  facts.counts_versions = writes && starts_with(name, "_foreach_");
  return facts;
}

const Facts& facts_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, Facts> known;
  const auto found = known.find(&op.schema());
  return found != known.end() ? found->second : known.emplace(&op.schema(), facts_from(op)).first->second;
}

// One call of an operator.
class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Stack* stack)
      : op_(op),
        facts_(facts_of(op)),
        stack_(stack),
        num_arguments_(op.schema().arguments().size()),
        first_(stack->size() - num_arguments_) {}

  int device() const;
  void run(int device);

 private:
  template <typename Function>
  void for_tensors(const Function& function) const;
  c10::IValue& argument(std::size_t i) const { return (*stack_)[first_ + i]; }
  void require_one_device(int device) const;
  void count_versions() const;
  void note_arguments(Stream* stream) const;
  void swap_arguments(int device, Aliases* aliases) const;
  void swap_results(Aliases* aliases) const;
  void call(Stream* stream);

  const c10::OperatorHandle& op_;
  const Facts& facts_;
  Stack* const stack_;
  const std::size_t num_arguments_;
  const std::size_t first_;
};

// function(tensor, is it written)
template <typename Function>
void Launch::for_tensors(const Function& function) const {
  for (std::size_t i = 0; i < num_arguments_; ++i) {
    const c10::IValue& value = argument(i);
    if (value.isTensor()) {
      function(value.toTensor(), facts_.writes[i]);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) function(tensor, facts_.writes[i]);
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector())
        function(tensor.value_or(at::Tensor()), facts_.writes[i]);
    }
  }
}

int Launch::device() const {
  int found = -1;
  for_tensors([&](const at::Tensor& tensor, bool) {
    if (found < 0 && tensor.defined() && tensor.is_privateuseone()) {
      found = tensor.device().index();
    }
  });
  for (std::size_t i = 0; found < 0 && i < num_arguments_; ++i) {
    const c10::IValue& value = argument(i);
    if (value.isDevice() && value.toDevice().is_privateuseone()) {
      found = value.toDevice().index();
    } else if (value.isStorage()) {
      found = value.toStorage().device().index();
    } else if (value.isGenerator()) {
      found = value.toGenerator().device().index();
    }
  }
  return found < 0 ? current_device() : found;
}

void Launch::require_one_device(int device) const {
  if (facts_.takes_any_device) {
    return;
  }
  for_tensors([&](const at::Tensor& tensor, bool) {
    const bool fits = !tensor.defined() || tensor.is_meta() ||
                      (tensor.is_privateuseone() ? tensor.device().index() == device : tensor.dim() == 0);
    TORCH_CHECK(fits, facts_.name, ": expected all tensors to be on the same device, but found at least two devices, ",
                torch_device(device), " and ", tensor.device());
  });
}

void Launch::count_versions() const {
  for_tensors([](const at::Tensor& tensor, bool is_written) {
    if (is_written && tensor.defined() && !tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  });
}

void Launch::note_arguments(Stream* stream) const {
  std::vector<Range> reads;
  std::vector<Range> writes;
  for_tensors([&](const at::Tensor& tensor, bool is_written) {
    if (tensor.defined() && tensor.is_privateuseone()) {
      const std::vector<Range> ranges = ranges_of(tensor);
      auto& noted = is_written ? writes : reads;
      noted.insert(noted.end(), ranges.begin(), ranges.end());
    }
  });
  note_kernel(stream, facts_.name, reads, writes);
}

void Launch::swap_arguments(int device, Aliases* aliases) const {
  for (std::size_t i = 0; i < num_arguments_; ++i) {
    c10::IValue& value = argument(i);
    if (value.isTensor()) {
      value = aliases->to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(aliases->to_cpu(tensor));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor.has_value() ? std::make_optional(aliases->to_cpu(*tensor)) : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (value.isStorage() && value.toStorage().device_type() == c10::kPrivateUse1) {
      value = aliases->to_cpu(value.toStorage());
    } else if (facts_.is_generator[i] && value.isNone()) {
      value = cpu_generator_of(default_generator(device));
    } else if (value.isGenerator() && value.toGenerator().device().is_privateuseone()) {
      value = cpu_generator_of(value.toGenerator());
    }
  }
}

void Launch::swap_results(Aliases* aliases) const {
  const std::size_t num_results = op_.schema().returns().size();
  for (std::size_t i = stack_->size() - num_results; i < stack_->size(); ++i) {
    c10::IValue& value = (*stack_)[i];
    if (value.isTensor()) {
      value = aliases->to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(aliases->to_device(tensor));
      value = std::move(list);
    }
  }
}

void Launch::call(Stream* stream) {
  const DeviceWorkspace workspace(stream->device);
  Aliases aliases(stream->device);
  swap_arguments(stream->device, &aliases);
  {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
  }
  aliases.write_back();
  swap_results(&aliases);
  if (!aliases.fresh().empty()) {
    note_kernel(stream, facts_.name, {}, aliases.fresh());
  }
}

void Launch::run(int device) {
  const c10::DeviceGuard guard(torch_device(device));
  require_one_device(device);
  Stream* const stream = current_stream(device);
  if (facts_.touches_no_bytes) {
    call(stream);
    return;
  }
  if (facts_.counts_versions) {
    count_versions();
  }
  {
    const KernelScope kernel(stream);
    note_arguments(stream);
    call(stream);
  }
  if (facts_.tells_host) {
    synchronize_with_host(stream);
  }
}

// From the innermost dimension outwards, as long as runs join.
std::size_t run_of(const std::vector<std::pair<std::int64_t, std::int64_t>>& dims, std::int64_t* elements) {
  std::size_t inner = 0;
  for (*elements = 1; inner < dims.size() && dims[inner].first <= *elements; ++inner) {
    *elements = std::max(*elements, dims[inner].first * (dims[inner].second - 1) + *elements);
  }
  return inner;
}

constexpr std::int64_t kMaxRuns = 64;

}  // namespace

std::vector<Range> ranges_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {};
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride and size
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) > 0) {
      dims.emplace_back(tensor.stride(i), tensor.size(i));
    }
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t elements = 1;
  std::vector<std::int64_t> starts = {0};
  const std::size_t inner = run_of(dims, &elements);
  for (std::size_t i = inner; i < dims.size(); ++i) {
    const auto [stride, size] = dims[i];
    if (static_cast<std::int64_t>(starts.size()) * size > kMaxRuns) {
      elements += stride * (size - 1);  // one run for all of this dimension
      continue;
    }
    std::vector<std::int64_t> more;
    for (std::int64_t step = 0; step < size; ++step) {
      for (const std::int64_t start : starts) more.push_back(start + step * stride);
    }
    starts = std::move(more);
  }
  const auto* const data = static_cast<const std::byte*>(tensor.unsafeGetTensorImpl()->data());
  const auto item = static_cast<std::int64_t>(tensor.itemsize());
  std::vector<Range> ranges;
  for (const std::int64_t start : starts) {
    ranges.push_back(range_of(data + start * item, static_cast<std::size_t>(elements * item)));
  }
  return ranges;
}

void note_kernel(Stream* stream, const char* what, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  const Lock lock = lock_machine();
  const Access access = streams().begin(lock, stream, what);
  std::size_t bytes = 0;
  for (const Range& range : reads) {
    checker().read(range, access, stream->clock);
    bytes += range.bytes();
  }
  for (const Range& range : writes) {
    checker().write(range, access, stream->clock);
    bytes += range.bytes();
  }
  if (streams().kernel_bytes_per_s > 0.0) {
    streams().advance(lock, stream, static_cast<double>(bytes) / streams().kernel_bytes_per_s);
  }
}

void synchronize_with_host(Stream* stream) {
  Lock lock = lock_machine();
  streams().synchronize(lock, streams().record(lock, stream));
}

void run_cpu_kernel_on(int device, const c10::OperatorHandle& op, Stack* stack) { Launch(op, stack).run(device); }

void run_cpu_kernel(const c10::OperatorHandle& op, Stack* stack) {
  Launch launch(op, stack);
  launch.run(launch.device());
}

}  // namespace actckpt::sim_device
