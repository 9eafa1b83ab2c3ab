// plan_bracket.cc -- plans whose kernels only begin and end the operation (bracket.cuh): the copy engine
// moves the data in between, or nothing does (barrier). See plan.h.
#include <stdexcept>

#include "planner.h"

namespace pycomm::cuda {

void Planner::by_copy_engine() {
  std::vector<Step> copies;
  const size_t nbytes = op_.nbytes();
  for (int k = 0; k < n_; ++k) {
    const int p = (me_ + k) % n_;
    const std::byte* from = op_.kind == OpKind::all_gather ? op_.in : op_.in_parts[me_].data;
    if (p != me_) from = buffers_.at_peer(from, p);
    if (!from) throw std::invalid_argument("algorithm copy_engine needs buffers from pycomm.empty");
    Step step;
    step.what = Step::What::copy;
    step.from = from;
    step.to = op_.out_parts[p].data;
    step.nbytes = nbytes;
    if (step.from != step.to && nbytes) copies.push_back(step);
  }
  // Offsets must agree: the copy engine is told addresses before anything is exchanged.
  args_.call.extra =
      buffers_.handle(op_.kind == OpKind::all_gather ? op_.in : op_.in_parts[0].data, 1).value_or(0);
  bracket(copies);
}

void Planner::bracket(const std::vector<Step>& copies) {
  args_.exposes = args_.reads = all();
  begin(Kernel::open, 1);
  const bool barrier = op_.kind == OpKind::barrier;
  launch({Kernel::open}, 1, stage_announce | (barrier && resident() ? stage_end : 0), 64);
  if (!resident()) sync();
  if (!resident() && !barrier)
    launch({Kernel::close}, 1, stage_verdict, 64);  // compares: peers that disagree may not come to the end
  plan_.steps.insert(plan_.steps.end(), copies.begin(), copies.end());
  if (!resident()) {
    if (!barrier) sync();
    launch({Kernel::close}, 1, stage_end, 64);
    sync();
    even_syncs();
  } else if (!barrier) {
    launch({Kernel::close}, 1, stage_fill | stage_gather | stage_end, 64);
  }
}

}  // namespace pycomm::cuda
