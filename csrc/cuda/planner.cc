// planner.cc -- see plan.h and planner.h.
#include "planner.h"

#include <algorithm>

#include "../op/fingerprint.h"

namespace pycomm::cuda {

// --- the call

Planner::Planner(const Op& op, const Shape& shape, const BufferLookup& buffers, uint64_t timeout_ns)
    : op_(op), shape_(shape), buffers_(buffers), n_(shape.world_size()), me_(shape.rank()) {
  args_.group = shape.group;
  args_.timeout_ns = timeout_ns;
  args_.resident = shape.protocol == Protocol::resident;
  args_.stages = all_stages;
  args_.end_segment = UINT32_MAX;
  args_.root = op.root;
  meta_.kind = op.kind;
  meta_.dtype = op.dtype;
  meta_.reduce_op = op.reduce_op;
  meta_.root = op.root;
  meta_.uneven = op.uneven;
}

LaunchPlan Planner::build() {
  plan_.in_order = !resident();
  find_buffers();
  meta_.direct = registered_ && !shape_.pointers;
  args_.call.count = op_.count;
  args_.call.extra = extra_of(op_);
  plan_.choice = choose(op_.kind, table_bytes(), shape_, reduction_kernel(), registered_, op_.algorithm);
  if (op_.reduces()) set_reduction();
  switch (op_.kind) {
    case OpKind::barrier: bracket({}); break;
    case OpKind::all_reduce:
    case OpKind::reduce:
    case OpKind::reduce_scatter: reduction(); break;
    case OpKind::broadcast:
      if (plan_.choice.algorithm == Algorithm::two_shot) broadcast_in_two();
      else movement();
      break;
    default:
      if (plan_.choice.algorithm == Algorithm::copy_engine) by_copy_engine();
      else movement();
  }
  return std::move(plan_);
}

KernelKey Planner::reduction_kernel() const {
  if (!op_.reduces()) return {Kernel::move};
  const ReductionKey key = reduction_key(op_.dtype, op_.reduce_op);
  return {Kernel::two_shot, key.dtype, key.op};
}

// What the choice table calls the size of the operation.
size_t Planner::table_bytes() const {
  if (op_.uneven && op_.kind != OpKind::all_to_all) return bytes_of(op_.count) / n_;
  if (op_.kind == OpKind::all_to_all && op_.uneven) return 0;
  return op_.nbytes();
}

// Are all buffers that this rank passes in registered memory?
void Planner::find_buffers() {
  registered_ = true;
  bool any = false;
  auto look = [&](const std::byte* data, size_t nbytes) {
    if (!nbytes || !data) return;
    any = true;
    registered_ = registered_ && buffers_.handle(data, nbytes).has_value();
  };
  if (op_.in) look(op_.in, bytes_of(op_.own_count(me_)));
  if (op_.out) look(op_.out, bytes_of(op_.own_count(me_)));
  for (const Part& part : op_.in_parts) look(part.data, bytes_of(part.count));
  for (const Part& part : op_.out_parts) look(part.data, bytes_of(part.count));
  registered_ = registered_ && any;
}

uint64_t Planner::handle(const std::byte* data) const {
  if (!data) return 0;
  if (shape_.pointers) return reinterpret_cast<uint64_t>(data);
  const auto found = registered_ ? buffers_.handle(data, 1) : std::nullopt;
  return found.value_or(0);
}

void Planner::set_reduction() {
  args_.premultiply = op_.reduce_op == ReduceOp::premul_sum;
  const DType t = op_.dtype;
  const bool has_sign = t == DType::i8 || t == DType::i16 || t == DType::i32 || t == DType::i64;
  args_.divide = op_.reduce_op != ReduceOp::avg ? divide_nothing : has_sign ? divide_signed : divide_plain;
  args_.factor = args_.divide ? n_ : op_.factor;
}

// --- steps

uint64_t Planner::staged_segment(int slots, int blocks) const {
  return shape_.group.half_bytes / (static_cast<uint64_t>(slots) * blocks) / align_bytes * align_bytes;
}

int Planner::blocks_for(uint64_t nbytes) const {
  return static_cast<int>(
      std::clamp<uint64_t>((nbytes + bytes_worth_a_block - 1) / bytes_worth_a_block, 1, shape_.blocks));
}

void Planner::begin(Kernel kernel, int blocks) {
  meta_.kernel = kernel;
  meta_.blocks = blocks;
  args_.call.meta = meta_.pack();
}

void Planner::at_segment(uint32_t s) {
  args_.first_segment = s;
  args_.end_segment = s + 1;
}

void Planner::launch(KernelKey key, int blocks, uint32_t stages, int threads) {
  Step step;
  step.what = Step::What::launch;
  step.key = key;
  step.blocks = blocks;
  step.threads = threads;
  step.args = args_;
  step.args.stages = stages;
  plan_.steps.push_back(step);
}

// In stream order, a segment after the other: fill, then the stages, each when all ranks are done with the
// one before.
void Planner::launch_segments(KernelKey key, int blocks, uint64_t longest,
                              std::initializer_list<uint32_t> stages) {
  const uint32_t segments = num_segments(longest, 0, blocks, args_.segment_bytes);
  for (uint32_t s = 0; s < std::max(segments, 1u); ++s) {
    at_segment(s);
    launch(key, blocks, stage_fill | (s == 0 ? stage_announce : 0));
    for (const uint32_t stage : stages) {
      sync();
      launch(key, blocks, stage);
    }
  }
  finish(key, blocks);
}

// Ends an operation in stream order: nobody reads from this rank any more.
void Planner::finish(KernelKey key, int blocks) {
  args_.first_segment = args_.end_segment = 0;
  sync();
  launch(key, blocks, stage_end);
  even_syncs();
}

// [Note: even number of exchanges] An exchange uses one of two sets of words in turn (sync_words.h), and a
// captured operation is replayed with the set it was captured with; so every operation ends with the set it
// did not begin with.
void Planner::even_syncs() {
  size_t count = 0;
  for (const Step& step : plan_.steps) count += step.what == Step::What::sync;
  if (count % 2) sync();
}

LaunchPlan plan_collective(const Op& op, const Shape& shape, const BufferLookup& buffers,
                           uint64_t timeout_ns) {
  return Planner(op, shape, buffers, timeout_ns).build();
}

ArenaShape arena_shape(int world_size, size_t staging_bytes) {
  constexpr uint64_t page = 4096, one_shot_bytes = 32 << 10;
  ArenaShape shape;
  shape.words_bytes = 2 * one_shot_bytes;
  shape.staging_offset = round_up_to(sizeof(Control) + 2 * max_ranks * shape.words_bytes, page);
  const uint64_t smallest = static_cast<uint64_t>(max_blocks) * (max_ranks + 1) *
                            align_bytes;  // every slot of a half holds a segment
  shape.half_bytes = round_up_to(std::max<uint64_t>(staging_bytes / 4, smallest), page);
  shape.message_offset = shape.staging_offset + 2 * shape.half_bytes;
  shape.message_bytes = round_up_to(
      std::max<uint64_t>(staging_bytes / 2 / world_size, 2 * message_blocks * align_bytes), 2 * page);
  shape.nbytes = shape.message_offset + world_size * shape.message_bytes;
  return shape;
}

}  // namespace pycomm::cuda
