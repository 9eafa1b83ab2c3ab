// explain.cc -- which algorithm a call would take, the SIMD level, and what the CUDA side says of itself: for
// pycomm.explain and tests.
#include "../arithmetic/reduce.h"
#include "../collectives/select.h"
#include "../cuda/device/spare.h"
#include "../cuda/plan.h"
#include "../transport/cores.h"
#include "../transport/hand_off.h"
#include "../transport/kernel_copy.h"
#include "bindings.h"

namespace pycomm {

namespace {

// signature of the call from Python; the last of what it returns: does the measured table decide
std::tuple<std::string, size_t, std::string, bool> choose(int kind, size_t nbytes, int world_size, int cores,
                                                          bool kernel_ahead, bool mapped, bool kernel_reads,
                                                          int algorithm, const TunedRows* tuned) {
  const auto op = static_cast<OpKind>(kind);
  if (algorithm == 0 && fits_payload(op, nbytes, world_size))
    return {"payload", 0, "the data travel with the operation's header: one exchange", false};
  const TunedTable table = tuned ? TunedTable::of(tuned->rows, world_size, cores) : TunedTable{};
  const Choice choice = select(op, nbytes, {world_size, cores, kernel_ahead, mapped, kernel_reads, &table},
                               static_cast<Algorithm>(algorithm));
  return {to_string(choice.algorithm), choice.block, choice.reason, choice.measured};
}

template <class Enum>
Enum named(const std::string& name, int count) {
  for (int i = 0; i < count; ++i)
    if (name == to_string(static_cast<Enum>(i))) return static_cast<Enum>(i);
  throw std::invalid_argument("unknown word " + name);
}

// (ranks, cores, access, op, until, algorithm), as pycomm/tuned.py reads them
using Line = std::tuple<int, int, std::string, std::string, size_t, std::string>;

std::shared_ptr<TunedRows> tuned_rows(const std::vector<Line>& lines) {
  auto tuned = std::make_shared<TunedRows>();
  for (const auto& [ranks, cores, access, op, until, algorithm] : lines)
    tuned->rows.push_back({ranks, cores, named<Access>(access, num_accesses), named<OpKind>(op, num_op_kinds),
                           until, named<Algorithm>(algorithm, num_algorithms)});
  check_rows(tuned->rows);
  return tuned;
}

// The same for f32 sums on CUDA tensors.
std::tuple<std::string, std::string> choose_on_device(int kind, size_t nbytes, int world_size,
                                                      bool one_device, bool registered, int algorithm) {
  cuda::Shape shape;
  shape.group.world_size = world_size;
  shape.group.words_bytes = cuda::arena_shape(world_size, 0).words_bytes;
  shape.pointers = one_device;
  const auto choice = cuda::choose(static_cast<OpKind>(kind), nbytes, shape,
                                   {cuda::Kernel::two_shot, DType::f32, ReduceOp::sum}, registered,
                                   static_cast<Algorithm>(algorithm));
  return {to_string(choice.algorithm), choice.reason};
}

}  // namespace

void bind_explain(py::module_& module) {
  py::class_<TunedRows, std::shared_ptr<TunedRows>>(module, "TunedRows")
      .def(py::init(&tuned_rows))
      .def("has", [](const TunedRows& self, int world_size, int cores) {
        return !TunedTable::of(self.rows, world_size, cores).empty();
      });
  module.def("choose", &choose);
  // What a group of processes like this one would find: (ns from core to core or None, whether the kernel's
  // copies are ahead).
  module.def("hand_off", [] {
    const std::string cores = allowed_cores(), cache = cores_of_one_cache(cores);
    const double seconds = hand_off_between_threads();
    const bool far = is_far(seconds, !cache.empty() && !all_within({cores}, cache));
    return std::make_tuple(seconds < 0 ? std::nullopt : std::optional<double>(seconds * 1e9),
                           far || kernel_copies_fast());
  });
  module.def("simd_level", &simd_level);
  module.def("set_simd_limit",
             [](std::optional<std::string> limit) { set_simd_limit(limit ? limit->c_str() : nullptr); });
  module.def("choose_on_device", &choose_on_device);
  module.def("built_with_cuda", &cuda::built_with_cuda);
  module.def("cuda_problem", &cuda::driver_problem);
  module.def("ranks_are_threads", &cuda::ranks_are_threads);
}

}  // namespace pycomm
