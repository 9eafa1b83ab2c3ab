// fake_launch.cc -- cuda/kernels/launch.h over the fake driver: a launch runs the very kernel on fibers,
// in the thread of its stream.
//
// Threads per block are few, since fibers take turns; how many blocks run at one time is the device's matter
// (fake_processors.h). Of the reductions only those named in `built` are there
// (minutes of compiling else); launching another fails. Not modelled: multimem, which needs to know the
// members of a multicast object.
#include "../../../csrc/cuda/kernels/launch.h"

#include <algorithm>
#include <stdexcept>

#include "../../../csrc/cuda/budget.h"
#include "../../../csrc/cuda/kernels/kernels.cuh"
#include "fake_processors.h"
#include "fake_state.h"

namespace pycomm::cuda {

namespace {

constexpr int most_threads = 32;  // not fewer than max_ranks

template <Kernel kernel, class T, ReduceOp op>
constexpr bool built = !reduces(kernel) ||
                       (kernel != Kernel::multimem &&
                        ((op == ReduceOp::sum && (std::is_same_v<T, float> || std::is_same_v<T, uint32_t>)) ||
                         (op == ReduceOp::max && std::is_same_v<T, float>)));

void violate(const std::string& text) {
  FakeState& state = fake_state();
  std::lock_guard lock(state.mutex);
  state.violations += text + "\n";
  std::fprintf(stderr, "fake launch: %s\n", text.c_str());
}

template <Kernel kernel, class T, ReduceOp op>
void run(const Args& args, int blocks, int threads, int device) {
  FakeSeats seats(device, blocks, threads, registers_of(kernel));
  const fiber::Outcome outcome =
      fiber::run_launch(args.group.rank, blocks, std::min(threads, most_threads), [&](fiber::FiberCtx& c) {
        seats.enter(c);
        run_kernel<kernel, T, op>(c, args);
        seats.leave(c);
      });
  if (!outcome.ok) violate(outcome.text);
}

// From the launch of a kernel to its end.
class UnderWay {
 public:
  explicit UnderWay(int device) : state_(fake_state()), device_(device) { add(1); }
  ~UnderWay() { add(-1); }
  UnderWay(const UnderWay&) = delete;

 private:
  void add(int one) {
    std::lock_guard lock(state_.mutex);
    state_.kernels[device_] += one;
    state_.kernel_ended.notify_all();
  }
  FakeState& state_;
  const int device_;
};

void refuse(const char* function) {
  if (const int error = fake_enter(function)) throw std::runtime_error(describe_result(error, function));
}

}  // namespace

bool built_with_cuda() { return true; }
void* driver_symbol(const char*, int) { return nullptr; }
bool has_kernel(const KernelKey& key) {
  return visit_kernel(key, []<Kernel kernel, class T, ReduceOp op>() {});
}
void load_kernels() { refuse("cudaFuncGetAttributes"); }

void launch(const KernelKey& key, const Args& args, int blocks, int threads, Stream stream) {
  refuse("cudaLaunchKernel");
  if (!fake_has_context()) violate("a launch without a context");
  if (blocks < 1 || blocks > max_blocks || threads < 1 || threads > max_threads)
    violate("a launch with a bad shape");
  const bool found = visit_kernel(key, [&]<Kernel kernel, class T, ReduceOp op>() {
    if constexpr (built<kernel, T, op>)
      fake_enqueue(stream, [args, blocks, threads, device = fake_current_device(),
                            under_way = std::make_shared<UnderWay>(fake_current_device())] {
        run<kernel, T, op>(args, blocks, threads, device);
      });
    else throw std::logic_error("a kernel that fake_launch.cc does not build");
  });
  if (!found) throw std::logic_error("pycomm: there is no such kernel");
}

}  // namespace pycomm::cuda
