// Random state of a device: a generator of the CPU's kind under the device's name.
//
// Contract: it gives what a CPU generator of the same seed gives; CPU kernels draw from `cpu_generator_of`.
// Thread rule: as torch's generators: hold their mutex. Ownership: shared.

#pragma once

#include <ATen/core/Generator.h>

namespace actckpt::sim_device {

at::Generator new_generator(int device);
const at::Generator& default_generator(int device);
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace actckpt::sim_device
