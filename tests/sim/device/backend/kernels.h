// Kernels: the CPU's, run on device memory.
//
// Contract: an operator that has no kernel of its own runs the CPU's on the same bytes, at launch, on the current
// stream of its device, and the checker is told what it read and wrote. Tensors on several devices are refused, as
// CUDA's kernels refuse them, but for 0-dimensional ones of the CPU and for indices. What a schema does not say is
// written, as the running statistics of `native_batch_norm`, counts as read.
// Thread rule: any thread.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {

// The bytes that the elements lie in: runs, or where there are many, all between the first and the last.
std::vector<Range> ranges_of(const at::Tensor& tensor);

// Tells the checker of a kernel. `what` lives for good.
void note_kernel(Stream* stream, const char* what, const std::vector<Range>& reads, const std::vector<Range>& writes);

// Makes the host know that what the stream was given so far has ended.
void synchronize_with_host(Stream* stream);

void run_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The same on the current stream of `device`, also where tensors are on others.
void run_cpu_kernel_on(int device, const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace actckpt::sim_device
