// plan_reduce.cc -- plans of what is reduced: two_shot.cuh, one_shot.cuh, ring.cuh, multimem.cuh; and of a
// large broadcast, which is two shots without arithmetic. See plan.h.
#include <algorithm>
#include <bit>
#include <stdexcept>

#include "planner.h"

namespace pycomm::cuda {

namespace {
constexpr uint64_t units_worth_a_block = max_threads;  // one_shot: one unit of 8 bytes per thread
}  // namespace

// Cuts the buffers of all_reduce, reduce and broadcast into equal parts.
void Planner::cut(const std::byte* in, std::byte* out, uint64_t nbytes) {
  const uint64_t part = round_up_to((nbytes + n_ - 1) / n_, align_bytes);
  for (int q = 0; q < n_; ++q) {
    const uint64_t begin = std::min(part * q, nbytes), end = std::min(part * (q + 1), nbytes);
    args_.in_bytes[q] = end - begin;
    args_.in_part[q] = in ? in + begin : nullptr;
    args_.out_part[q] = out ? out + begin : nullptr;
  }
}

void Planner::reduction() {
  const ReductionKey key = reduction_key(op_.dtype, op_.reduce_op);
  const Algorithm algorithm = plan_.choice.algorithm;
  if (op_.kind == OpKind::reduce_scatter) {
    for (int q = 0; q < n_; ++q) {
      args_.in_bytes[q] = bytes_of(op_.in_parts[q].count);
      args_.in_part[q] = op_.in_parts[q].data;
    }
    args_.out_part[me_] = op_.out;
  } else if (algorithm == Algorithm::one_shot) {
    args_.in_bytes[0] = op_.nbytes();
    args_.in_part[0] = op_.in;
    args_.out_part[0] = op_.out;
    return one_shot(key);
  } else {
    cut(op_.in, op_.out, op_.nbytes());
  }
  if (algorithm == Algorithm::ring) return ring(key);
  if (algorithm == Algorithm::multimem) return multimem(key);
  args_.direct_in = direct();
  if (op_.kind == OpKind::reduce_scatter) args_.stores = bit(me_);
  else if (direct()) args_.stores = op_.kind == OpKind::all_reduce ? all() : bit(op_.root);
  args_.results = args_.stores == 0;
  args_.fetch = op_.kind == OpKind::all_reduce || op_.root == me_;
  args_.exposes = args_.reads = all();
  note_handles();
  in_two_shots({Kernel::two_shot, key.dtype, key.op});
}

void Planner::broadcast_in_two() {
  const bool is_root = op_.root == me_;
  cut(is_root ? op_.in : nullptr, is_root ? nullptr : op_.out, op_.nbytes());
  args_.direct_in = direct();
  args_.stores = direct() ? all() : 0;
  args_.results = !direct();
  args_.fetch = !is_root;
  args_.exposes = is_root ? all() : 0;
  args_.reads = bit(op_.root);
  // The root has the result already: what others would store there is what lies there.
  for (int q = 0; q < n_ && is_root; ++q)
    args_.out_part[q] = direct() ? const_cast<std::byte*>(args_.in_part[q]) : nullptr;
  note_handles();
  in_two_shots({Kernel::copy_two_shot});
}

// Rank t reads my input of part t and stores its result into my out of part t.
void Planner::note_handles() {
  for (int t = 0; t < n_; ++t) {
    args_.in_handle[t] = handle(args_.in_part[t]);
    args_.out_handle[t] = handle(args_.out_part[t]);
  }
}

void Planner::in_two_shots(KernelKey key) {
  uint64_t longest = 0;
  for (int q = 0; q < n_; ++q) longest = std::max(longest, args_.in_bytes[q]);
  const int blocks = blocks_for(longest * (op_.kind == OpKind::reduce_scatter ? 1 : n_));
  args_.slots = (args_.direct_in ? 0 : n_) + args_.results;
  args_.segment_bytes = args_.slots ? staged_segment(args_.slots, blocks) : whole_slice;
  begin(key.kernel, blocks);
  if (resident()) return launch(key, blocks, all_stages);
  if (args_.results) launch_segments(key, blocks, longest, {stage_reduce, stage_gather});
  else launch_segments(key, blocks, longest, {stage_reduce});
}

void Planner::one_shot(const ReductionKey& reduction) {
  const KernelKey key{Kernel::one_shot, reduction.dtype, reduction.op};
  meta_.direct = false;  // words are copied from any buffer, so ranks need not agree on this
  const int blocks = static_cast<int>(std::clamp<uint64_t>(
      (op_.nbytes() / 8 + units_worth_a_block - 1) / units_worth_a_block, 1, shape_.blocks));
  begin(key.kernel, blocks);
  if (resident()) return launch(key, blocks, all_stages);
  launch(key, blocks, stage_announce | stage_fill);
  sync();
  launch(key, blocks, stage_gather | stage_end);
  sync();
}

void Planner::ring(const ReductionKey& reduction) {
  const KernelKey key{Kernel::ring, reduction.dtype, reduction.op};
  const int blocks = blocks_for(op_.nbytes());
  args_.segment_bytes =
      2 * shape_.group.half_bytes / (static_cast<uint64_t>(ring_slots) * blocks) / align_bytes * align_bytes;
  begin(key.kernel, blocks);
  launch(key, blocks, all_stages);
}

void Planner::multimem(const ReductionKey& reduction) {
  const KernelKey key{Kernel::multimem, reduction.dtype, reduction.op};
  const int blocks = blocks_for(op_.nbytes());
  args_.multicast_in = buffers_.multicast(op_.in);
  args_.multicast_out = buffers_.multicast(op_.out);
  if (!args_.multicast_in || !args_.multicast_out || op_.nbytes() % 16 ||
      (reinterpret_cast<uintptr_t>(op_.in) | reinterpret_cast<uintptr_t>(op_.out)) % 16)
    throw std::invalid_argument(
        "algorithm multimem needs in and out in one buffer of pycomm.empty with multicast, aligned to 16 "
        "bytes");
  args_.call.extra =
      buffers_.handle(op_.in, 1).value_or(0) ^ std::rotl(buffers_.handle(op_.out, 1).value_or(0), 1);
  begin(key.kernel, blocks);
  launch(key, blocks, all_stages);
}

}  // namespace pycomm::cuda
