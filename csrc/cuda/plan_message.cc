// plan_message.cc -- the steps of a send or a recv. See plan.h and message.cuh.
#include <algorithm>

#include "plan.h"

namespace pycomm::cuda {

namespace {

int blocks_of(const MessageCall& message, const Shape& shape) {
  const uint64_t wanted = (message.nbytes() + bytes_worth_a_block - 1) / bytes_worth_a_block;
  return static_cast<int>(std::clamp<uint64_t>(wanted, 1, std::min(shape.blocks_of_message, shape.blocks)));
}

Args args_of(const MessageCall& message, const Shape& shape, const BufferLookup& buffers, int blocks) {
  const auto handle = shape.pointers ? std::optional(reinterpret_cast<uint64_t>(message.data))
                                     : buffers.handle(message.data, std::max<size_t>(message.nbytes(), 1));
  Meta meta;
  meta.kind = OpKind::send;
  meta.dtype = message.dtype;
  meta.kernel = Kernel::send;
  meta.blocks = blocks;
  meta.direct = handle.has_value() && !shape.pointers;
  Args args{};
  args.group = shape.group;
  args.resident = shape.protocol == Protocol::resident && !shape.messages_in_order;
  args.end_segment = UINT32_MAX;
  args.peer = message.peer;
  args.direct_in = handle.has_value();
  args.in_handle[0] = handle.value_or(0);
  args.call = {meta.pack(), message.count, static_cast<uint64_t>(message.tag), 0, 0};
  args.in_part[0] = message.data;
  args.out_part[0] = message.data;
  args.in_bytes[0] = message.nbytes();
  args.segment_bytes =
      args.direct_in ? whole_slice : shape.group.message_bytes / 2 / blocks / align_bytes * align_bytes;
  return args;
}

}  // namespace

LaunchPlan plan_message(const MessageCall& message, const Shape& shape, const BufferLookup& buffers,
                        uint64_t timeout_ns) {
  const int blocks = blocks_of(message, shape);
  Args args = args_of(message, shape, buffers, blocks);
  args.timeout_ns = timeout_ns;
  LaunchPlan plan;
  plan.choice = {args.direct_in ? Algorithm::direct : Algorithm::staged,
                 "the receiver reads from the sender"};
  plan.sends = message.sends;
  plan.in_order = !args.resident;
  const KernelKey key{message.sends ? Kernel::send : Kernel::recv};
  auto launch = [&](uint32_t stages) {
    Step step;
    step.what = Step::What::launch;
    step.key = key;
    step.blocks = blocks;
    step.args = args;
    step.args.stages = stages;
    plan.steps.push_back(step);
  };
  auto turn = [&](Step::What what) {
    Step step;
    step.what = what;
    step.peer = message.peer;
    plan.steps.push_back(step);
  };
  if (args.resident) {
    launch(all_stages);
    return plan;
  }
  const uint32_t segments = std::max(num_segments(message.nbytes(), 0, blocks, args.segment_bytes), 1u);
  for (uint32_t s = 0; s < segments; ++s) {
    args.first_segment = s;
    args.end_segment = s + 1;
    const uint32_t announce = s == 0 ? stage_announce : 0;
    if (message.sends) {
      launch(announce | stage_fill);
      turn(Step::What::post);
      turn(Step::What::await);
    } else {
      turn(Step::What::await);
      launch(announce | stage_gather | (s + 1 == segments ? stage_end : 0));
      turn(Step::What::post);
    }
  }
  if (message.sends) launch(stage_end);
  return plan;
}

}  // namespace pycomm::cuda
