// backend.h -- pycomm as a backend of torch.distributed: c10d::Backend over a Communicator.
//
// A call becomes a task (tensors.h) and is either run at once, in the caller's thread, or issued (submit.h):
//   asyncOp false   the task has run when the call returns; there is no Work (nullptr, None in Python), as
//                   with NCCL since torch 2.7: torch's Python functions then neither wrap nor wait. An error
//                   is thrown by the call itself.
//   asyncOp true    the default of torch's options, so what DDP, FSDP2 and functional collectives get: a
//                   TorchWork
// Between startCoalescing() and endCoalescing() of one thread everything is issued, and endCoalescing()
// returns one Work for all of it.
//
// Errors: std::invalid_argument for what is wrong on this rank alone (ValueError in Python); TorchCommError
// (torch_work.h) for the wire, which becomes one of pycomm.errors in Python, also on its way through torch's
// own bindings: both share pybind11's translators.
//
// The class overrides what torch 2.11 to 2.15 have in common. 2.14 has new names (all_gather_single, ...),
// which call these ones.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "connect.h"
#include "submit.h"

namespace pycomm {

inline constexpr const char* backend_name = "pycomm";

using Algorithms = std::array<Algorithm, static_cast<size_t>(OpKind::alloc) + 1>;  // by OpKind

// How the hosts of a group are connected, by the group's store.
using MakersWithStore = std::function<Makers(const c10::intrusive_ptr<c10d::Store>& store)>;

class PycommBackend final : public c10d::Backend {
  struct Joined;

 public:
  struct Options final : c10d::Backend::Options {
    Options(std::chrono::milliseconds timeout, TransportOptions transport, Algorithms algorithms,
            MakersWithStore makers)
        : c10d::Backend::Options(backend_name, timeout),
          transport(std::move(transport)),
          algorithms(algorithms),
          makers(std::move(makers)) {}
    // Virtual from torch 2.14 on, where the base's clone() would cut off our members.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }

    TransportOptions transport;
    Algorithms algorithms;
    MakersWithStore makers;
  };

  // Blocks until all ranks of the group have come.
  PycommBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                c10::intrusive_ptr<Options> options);
  explicit PycommBackend(Joined joined);
  // Does not wait for peers: what is still under way fails, as after shutdown().
  ~PycommBackend() override;

  const std::shared_ptr<Communicator>& communicator() const { return comm_; }

  const std::string getBackendName() const override { return backend_name; }
  // A copy, because torch writes name and time limit of a split group into the result.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(*options_);
  }

  using Lists = std::vector<Tensors>;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions& opts);  // virtual from torch 2.14 on
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Not in the sequence of the group's operations; a timeout does not break the group.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { submitter_.start_coalescing(); }
  WorkPtr endCoalescing() override { return submitter_.end_coalescing(); }

  // Operations are numbered from 1 on all ranks alike by the communicator, so there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return comm_->next_sequence() - 1; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // A flat tensor of zeros in registered memory (registered_tensor.h), which collectives of this group use
  // without staging memory. Collective on the group.
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  // torch passes the index of the device alone: -1 for "cpu" and "cuda", 0 for "cpu:0" as for "cuda:0".
  bool supportsTensorAlloc(c10::DeviceIndex index) override;

  void enableCollectivesTiming() override { submitter_.enable_timing(); }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { submitter_.wait_for_hooks(); }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;

  // Collective among all ranks but those, which may be dead; transport/survivors.h. No flag has a meaning
  // here, and the options of the new group are those of this one, as are the names of its ranks.
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  // The same where torch need not say who is lost: the ranks that are left, in this group. The next shrink()
  // returns what was made. Where that has lost ranks meanwhile, a further call makes another of those left.
  std::vector<int> shrink_ahead(const std::vector<int>& exclude, double timeout);
  const c10::intrusive_ptr<PycommBackend>& shrunk() const { return shrunk_; }

 private:
  struct Joined {
    c10::intrusive_ptr<Options> options;
    std::shared_ptr<Communicator> comm;
  };
  CallOptions call_options(OpKind kind, std::chrono::milliseconds timeout) const;
  const at::Tensor& single(OpKind kind, const Tensors& tensors) const;
  const Tensors& single(OpKind kind, const Lists& lists) const;
  const Tensors& of_root(OpKind kind, const Lists& lists, int root) const;
  [[noreturn]] void bad(OpKind kind, const std::string& text) const;

  RecordedGroup describe() const;
  std::vector<int> make_shrunk(const std::vector<int>& exclude, bool exactly, double timeout);
  c10::intrusive_ptr<Options> options_of(const std::vector<int>& ranks, const std::string& name) const;

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Communicator> comm_;
  Submitter submitter_;
  c10::intrusive_ptr<PycommBackend> shrunk_;  // by shrink_ahead()
  std::vector<int> shrunk_ranks_;  // its ranks in this group
};

}  // namespace pycomm
