// planner.h -- builds the plan of one collective (plan.h); by movement in plan_reduce.cc, plan_move.cc and
// plan_bracket.cc, as the kernels are.
#pragma once

#include <initializer_list>

#include "plan.h"

namespace pycomm::cuda {

class Planner {
 public:
  Planner(const Op& op, const Shape& shape, const BufferLookup& buffers, uint64_t timeout_ns);
  LaunchPlan build();

 private:
  bool resident() const { return shape_.protocol == Protocol::resident; }
  uint32_t all() const { return (1u << n_) - 1; }
  uint32_t bit(int rank) const { return 1u << rank; }
  size_t bytes_of(size_t count) const { return count * size_of(op_.dtype); }

  // --- planner.cc: the call ---
  KernelKey reduction_kernel() const;
  size_t table_bytes() const;
  void find_buffers();
  void set_reduction();
  bool direct() const { return shape_.pointers || registered_; }  // peers address this call's buffers
  uint64_t handle(const std::byte* data) const;

  // --- planner.cc: steps ---
  uint64_t staged_segment(int slots, int blocks) const;
  int blocks_for(uint64_t nbytes) const;
  void begin(Kernel kernel, int blocks);
  void at_segment(uint32_t s);
  void launch(KernelKey key, int blocks, uint32_t stages, int threads = max_threads);
  void launch_segments(KernelKey key, int blocks, uint64_t longest, std::initializer_list<uint32_t> stages);
  void sync() { plan_.steps.push_back({}); }
  void finish(KernelKey key, int blocks);
  void even_syncs();

  // --- plan_reduce.cc ---
  void reduction();
  void broadcast_in_two();
  void cut(const std::byte* in, std::byte* out, uint64_t nbytes);
  void note_handles();
  void in_two_shots(KernelKey key);
  void one_shot(const ReductionKey& reduction);
  void ring(const ReductionKey& reduction);
  void multimem(const ReductionKey& reduction);

  // --- plan_move.cc ---
  void movement();
  void expose(int to, const std::byte* data, size_t nbytes);
  void read(int from, std::byte* to, size_t nbytes);
  void expose_and_read();
  void move(int blocks);
  void pairwise(KernelKey key, int blocks);

  // --- plan_bracket.cc ---
  void by_copy_engine();
  void bracket(const std::vector<Step>& copies);

  const Op& op_;
  const Shape& shape_;
  const BufferLookup& buffers_;
  const int n_, me_;
  bool registered_ = false;  // all buffers that this rank passes lie in registered memory
  // Bytes of the longest part; in pairwise exchanges only of those that this rank knows.
  uint64_t longest_ = 0;
  Args args_{};
  Meta meta_;
  LaunchPlan plan_;
};

}  // namespace pycomm::cuda
