// kernel_launch.h -- the kernels as the fiber machine launches them. Compiled apart from the suites
// (kernel_launch.cc), since only this part changes with a kernel.
#pragma once

#include "../../../csrc/cuda/plan.h"
#include "fiber.h"

namespace pycomm::cuda::testing {

// Enqueues the launch of a step; with at most `threads` per block. In builds with PYCOMM_WEAK under the weak
// memory of weak_ctx.h.
void launch_step(fiber::Machine& machine, fiber::Stream& stream, const Step& step, int threads);

// Is the kernel in this program? All that exist are, but in builds with PYCOMM_FEW_KERNELS: sums of f32, bf16
// and u8, max of f32.
bool is_built(const KernelKey& key);

}  // namespace pycomm::cuda::testing
