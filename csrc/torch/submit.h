// submit.h -- how the calls of a torch process group are run, issued, coalesced and recorded.
//
// See backend.h for what a call returns. A Submitter belongs to one PycommBackend and is used from all
// threads that call it.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"
#include "flight_recorder.h"
#include "tensors.h"
#include "torch_work.h"

namespace pycomm {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A call as torch made it.
struct TorchCall {
  c10d::OpType type;
  const char* name;  // as torch's flight-recorder tools know it
  std::chrono::milliseconds timeout;
  bool async_op = true;
  const char* title = nullptr;  // in torch's profiler; null: name
};

// A send or a recv as torch made it; its work is always asynchronous.
struct TorchMessage {
  c10d::OpType type;
  const char* name;
  const char* title;  // in torch's profiler
  int peer;
  int tag;
  bool sends() const { return type == c10d::OpType::SEND; }
};

class Submitter {
 public:
  // `describe` is asked once, at the first recorded call: torch names a group only after its constructor.
  Submitter(std::shared_ptr<Communicator> comm, std::function<RecordedGroup()> describe,
            std::chrono::milliseconds timeout)
      : comm_(std::move(comm)), describe_(std::move(describe)), timeout_(timeout) {}

  WorkPtr submit(const TorchCall& call, Request request, at::TensorList inputs, at::TensorList outputs);
  WorkPtr submit(const TorchCall& call, const TaskPtr& task, at::TensorList inputs, at::TensorList outputs);
  // One Work for several requests.
  WorkPtr submit_all(const TorchCall& call, std::vector<Request> requests, at::TensorList inputs,
                     at::TensorList outputs);
  WorkPtr submit_message(const TorchMessage& call, const at::Tensor& tensor);
  // In this thread, whatever call.async_op says.
  void run_now(const TorchCall& call, TensorTask& task, at::TensorList inputs, at::TensorList outputs);

  void start_coalescing();
  WorkPtr end_coalescing();

  void set_timeout(std::chrono::milliseconds timeout) { timeout_.store(timeout); }
  void enable_timing() { timing_ = true; }
  bool has_hook() const { return hook_ != nullptr; }
  void set_hook(std::function<void(std::shared_ptr<c10d::WorkInfo>)> hook);
  void wait_for_hooks();

 private:
  // The works of a start_coalescing() ... end_coalescing().
  struct Batch {
    std::thread::id owner;
    Parts parts;
    Tensors outputs;
  };

  WorkPtr submit_on_device(const TorchCall& call, std::vector<Request> requests, at::TensorList inputs,
                           at::TensorList outputs);
  void batch_on_device(c10::Device device);
  void end_batch_on_device();
  std::shared_ptr<Work> start_message(const TorchMessage& call, const at::Tensor& tensor);
  WorkPtr handle(const TorchCall& call, uint64_t sequence, Parts parts, at::TensorList inputs,
                 at::TensorList outputs);
  uint64_t record(const TorchCall& call, uint64_t sequence, at::TensorList inputs, at::TensorList outputs);
  uint64_t record(FlightRecord head, std::chrono::milliseconds timeout, at::TensorList inputs,
                  at::TensorList outputs);
  bool coalescing() const {
    return coalescing_.load(std::memory_order_acquire) && batch_.owner == std::this_thread::get_id();
  }

  const std::shared_ptr<Communicator> comm_;
  const std::function<RecordedGroup()> describe_;
  std::atomic<std::chrono::milliseconds> timeout_;  // of the group, for records
  std::once_flag described_;
  std::shared_ptr<const RecordedGroup> recorded_group_;
  std::shared_ptr<CompletionHook> hook_;
  std::atomic<bool> timing_{false};
  std::atomic<bool> coalescing_{false};
  std::atomic<uint64_t> num_messages_{0};
  Batch batch_;  // of the one thread that coalesces
};

}  // namespace pycomm
