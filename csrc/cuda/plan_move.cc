// plan_move.cc -- plans of what is moved without arithmetic, by the kernel of move.cuh. See plan.h.
#include <algorithm>
#include <stdexcept>

#include "planner.h"

namespace pycomm::cuda {

void Planner::movement() {
  args_.direct_in = direct();
  args_.distinct = op_.kind == OpKind::all_to_all || op_.kind == OpKind::scatter;
  args_.pairwise = op_.kind == OpKind::all_to_all && op_.uneven;
  expose_and_read();
  if (op_.uneven && op_.kind == OpKind::all_gather)
    for (const Part& part : op_.out_parts) longest_ = std::max<uint64_t>(longest_, bytes_of(part.count));
  const bool many = op_.kind == OpKind::all_gather || op_.kind == OpKind::all_to_all ||
                    op_.kind == OpKind::gather || op_.kind == OpKind::scatter;
  move(args_.pairwise ? shape_.blocks : blocks_for(longest_ * (many ? n_ : 1)));
}

// Rank `to` reads this from here.
void Planner::expose(int to, const std::byte* data, size_t nbytes) {
  args_.in_bytes[to] = nbytes;
  if (to != me_) args_.exposes |= bit(to);
  args_.in_part[args_.distinct ? to : 0] = data;
  args_.in_handle[to] = handle(data);
  longest_ = std::max<uint64_t>(longest_, nbytes);
}

// This rank reads what rank `from` exposes to it.
void Planner::read(int from, std::byte* to, size_t nbytes) {
  args_.out_bytes[from] = nbytes;
  args_.reads |= bit(from);
  args_.out_part[from] = to;
  longest_ = std::max<uint64_t>(longest_, nbytes);
}

void Planner::expose_and_read() {
  const bool is_root = op_.root == me_;
  const size_t own = bytes_of(op_.own_count(me_));
  auto expose_parts = [&] {
    for (int p = 0; p < n_; ++p) expose(p, op_.in_parts[p].data, bytes_of(op_.in_parts[p].count));
  };
  auto read_parts = [&] {
    for (int p = 0; p < n_; ++p) read(p, op_.out_parts[p].data, bytes_of(op_.out_parts[p].count));
  };
  switch (op_.kind) {
    case OpKind::all_gather:
      for (int p = 0; p < n_; ++p) expose(p, op_.in, own);
      read_parts();
      break;
    case OpKind::gather:
      expose(op_.root, op_.in, own);
      if (is_root) read_parts();
      break;
    case OpKind::scatter:
      if (is_root) expose_parts();
      read(op_.root, op_.out, own);
      break;
    case OpKind::broadcast:
      for (int p = 0; p < n_ && is_root; ++p) expose(p, op_.in, op_.nbytes());
      if (!is_root) read(op_.root, op_.out, op_.nbytes());
      break;
    case OpKind::all_to_all:
      expose_parts();
      read_parts();
      break;
    default: throw std::logic_error("pycomm: unknown collective");
  }
}

void Planner::move(int blocks) {
  const KernelKey key{Kernel::move};
  args_.slots = args_.distinct ? n_ : 1;
  args_.segment_bytes = args_.direct_in ? whole_slice : staged_segment(args_.slots, blocks);
  begin(key.kernel, blocks);
  if (resident()) return launch(key, blocks, all_stages);
  if (args_.pairwise) return pairwise(key, blocks);
  launch_segments(key, blocks, longest_, {stage_gather});
}

// In stream order, ranks must exchange equally often, but only pairs know how long they need. So one round,
// in segments as long as it takes: each rank's parts go through its staging if they fit, and the rest is
// refused with the way out.
void Planner::pairwise(KernelKey key, int blocks) {
  uint64_t longest = 0;
  for (int p = 0; p < n_; ++p)
    longest = std::max({longest, p == me_ ? 0 : args_.in_bytes[p], p == me_ ? 0 : args_.out_bytes[p]});
  if (!args_.direct_in && num_segments(longest, 0, blocks, args_.segment_bytes) > 2)
    throw std::invalid_argument(
        "all_to_all with splits between processes that share a GPU without MPS moves at most " +
        std::to_string(2 * args_.segment_bytes * blocks) +
        " bytes between two ranks through the staging, got " + std::to_string(longest) +
        ". Use buffers from pycomm.empty, a larger staging, or MPS.");
  args_.end_segment = 2;
  launch(key, blocks, stage_announce | stage_fill);
  sync();
  launch(key, blocks, stage_verdict);
  sync();
  launch(key, blocks, stage_gather);
  args_.end_segment = 0;
  args_.first_segment = 0;
  finish(key, blocks);
}

}  // namespace pycomm::cuda
