// kernel_launch.cc -- see kernel_launch.h.
#include "kernel_launch.h"

#include <algorithm>
#include <stdexcept>

#include "../../../csrc/cuda/kernels/kernels.cuh"
#include "weak_ctx.h"

namespace pycomm::cuda {

bool has_kernel(const KernelKey& key) {
  return visit_kernel(key, []<Kernel kernel, class T, ReduceOp op>() {});
}

namespace fiber {

template <>
struct MultimemType<F16> {
  using Sum = float;
  static float widen(F16 x) { return pycomm::cuda::widen(x); }
  static F16 narrow(float x) { return to_f16(x); }
};
template <>
struct MultimemType<BF16> {
  using Sum = float;
  static float widen(BF16 x) { return pycomm::cuda::widen(x); }
  static BF16 narrow(float x) { return to_bf16(x); }
};

}  // namespace fiber

namespace testing {

namespace {

#ifdef PYCOMM_FEW_KERNELS  // programs with sanitizers: minutes of compiling else
template <class T, ReduceOp op>
inline constexpr bool built = (op == ReduceOp::sum && (std::is_same_v<T, float> || std::is_same_v<T, BF16> ||
                                                       std::is_same_v<T, uint8_t>)) ||
                              (op == ReduceOp::max && std::is_same_v<T, float>);
#else
template <class T, ReduceOp op>
inline constexpr bool built = true;
#endif

using Run = void (*)(fiber::FiberCtx& c, const Args& args);

template <Kernel kernel, class T, ReduceOp op>
void run(fiber::FiberCtx& c, const Args& args) {
#ifdef PYCOMM_WEAK
  WeakCtx weak(c);
  run_kernel<kernel, T, op>(weak, args);
  weak.drain();
#else
  run_kernel<kernel, T, op>(c, args);
#endif
}

// nullptr if it is not in this program.
Run find(const KernelKey& key) {
  Run found = nullptr;
  visit_kernel(key, [&]<Kernel kernel, class T, ReduceOp op>() {
    if constexpr (built<T, op>) found = run<kernel, T, op>;
  });
  return found;
}

}  // namespace

bool is_built(const KernelKey& key) { return find(key) != nullptr; }

void launch_step(fiber::Machine& machine, fiber::Stream& stream, const Step& step, int threads) {
  const Run run_step = find(step.key);
  if (!run_step) throw std::logic_error("no such kernel");
  machine.launch(stream, step.blocks, std::min(step.threads, threads),
                 [run_step, args = step.args](fiber::FiberCtx& c) { run_step(c, args); });
}

}  // namespace testing
}  // namespace pycomm::cuda
