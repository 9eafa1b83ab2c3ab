// torch_work.h -- c10d::Work over the core's works: one for an ordinary call, several for coalesced ones.
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "../collectives/collectives.h"
#include "../communicator/messages.h"

namespace pycomm {

using Parts = c10::SmallVector<std::shared_ptr<Work>, 1>;

// A CommError as torch's own code knows errors of a backend. Where an error reaches Python through pybind11
// (all of torch.distributed) it becomes one of pycomm.errors again (bindings/backend.cc). Where torch's other
// machinery carries it (out of backward() with DDP, out of torch.ops), it becomes
// torch.distributed.DistBackendError, their base class, instead of a mere RuntimeError.
class TorchCommError final : public c10::DistBackendError {
 public:
  explicit TorchCommError(const CommError& error)
      : c10::DistBackendError(std::string(error.what())), error_(error) {}
  const CommError& error() const { return error_; }

 private:
  CommError error_;
};

// The same error, as TorchCommError if it is a CommError.
std::exception_ptr for_torch(const std::exception_ptr& error);

// What Backend::registerOnCompletionHook asked for. Shared with the works, which may outlive the backend.
struct CompletionHook {
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> call;
  std::mutex mutex;
  std::condition_variable idle;
  int pending = 0;  // works issued whose hook has not returned
};

class TorchWork final : public c10d::Work {
 public:
  // The group, which must outlive its works, and the tensors, which the parts keep, live as long as this
  // object. A profiling title makes torch's profiler show the operation, with the shapes of
  // `profiled_inputs`, from here to its end.
  TorchWork(std::shared_ptr<Communicator> comm, c10d::OpType type, uint64_t sequence, Parts parts,
            std::vector<at::Tensor> outputs, const char* profiling_title, at::TensorList profiled_inputs);
  // Parts hold a reference to their group until they are gone.
  ~TorchWork() override = default;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override {
    comm_->abort("abort() of an operation was called on rank " + std::to_string(comm_->rank()));
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;  // milliseconds
  uint64_t getSequencenumber() const override { return sequence_; }

  // The future's value is then this many lists of tensors, of one length each, instead of one list. Before
  // the work is handed out.
  void set_lists(size_t lists) { lists_ = lists; }

  const Parts& parts() const { return parts_; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }

  // Notes the time of completion, ends the profiler's event, and calls the hook if there is one. Costs
  // allocations, so only on demand; `self` must be this object, whose life it prolongs until then.
  static void observe(const c10::intrusive_ptr<TorchWork>& self, std::shared_ptr<CompletionHook> hook);
  bool profiled() const { return static_cast<bool>(recordFunctionEndCallback_); }

 private:
  using Clock = std::chrono::steady_clock;

  bool on_device() const;
  c10::IValue value() const;
  c10::TypePtr value_type() const;
  c10::intrusive_ptr<c10::ivalue::Future> make_device_future();
  template <class Complete>
  c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::TypePtr type, Complete complete);

  std::shared_ptr<Communicator> comm_;  // before parts_: destroyed after them
  Parts parts_;
  std::vector<at::Tensor> outputs_;
  size_t lists_ = 1;
  uint64_t sequence_;
  Clock::time_point started_{};
  std::atomic<float> duration_ms_{-1};
  c10::intrusive_ptr<c10::ivalue::Future> future_, future_result_;  // guarded by the base's mutex_
};

}  // namespace pycomm
