// torch_work.cc -- see torch_work.h.
#include "torch_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <system_error>
#include <thread>

#include "device.h"
#include "interpreter.h"
#include "timeouts.h"

namespace pycomm {

namespace {

// [Note: callbacks that wait] Callbacks of a future run in the thread that completes it, often the group's
// worker, and may themselves issue operations and wait for their futures (powerSGD's comm hook does). The
// worker, being inside the callback, cannot complete those. So a future that is asked for inside a callback
// gets a thread of its own that waits for it. Gloo has two workers instead, which is enough for callbacks
// that nest once.
thread_local int callbacks_running = 0;

using CommPtr = std::shared_ptr<Communicator>;

// Tells the group of an error that nobody can catch: what the user's own code raised on a thread of the
// group's. The group is aborted, as NCCL's is for a hook that raises.
void abort_for(const CommPtr& comm, const char* whose, const std::exception& error) {
  if (comm) comm->abort(std::string(whose) + " raised: " + error.what());
}

// What is to be called when all parts of a work are done, with the error of the first failed one.
template <class Callback>
struct Completion {
  Completion(const CommPtr& comm, const Parts& parts, Callback callback)
      : comm(comm), parts(parts), callback(std::move(callback)), missing(parts.size()) {}

  void run() {
    std::exception_ptr error;
    for (const auto& part : parts)
      if (!error) error = part->error();
    ++callbacks_running;
    try {
      callback(error);
    } catch (const std::exception& raised) {
      abort_for(comm.lock(), "a callback of a future", raised);
    }
    --callbacks_running;
  }

  std::weak_ptr<Communicator> comm;  // a group need not live until its last callback
  Parts parts;  // alive until all are done, whoever else lets go
  Callback callback;
  std::atomic<size_t> missing;
};

// [Note: callbacks inside a wait] A thread that waits in an operation makes progress with messages beside it,
// and so may complete one whose callback issues an operation of the same group and waits for it: behind the
// first, for ever. Such a callback gets a thread of its own; the worker would not do, for it may be the
// thread that waits, or be held up by another callback.
template <class Callback>
void complete(std::shared_ptr<Completion<Callback>> completion) {
  const PythonStay stay;
  if (stay) completion->run();
  else new auto(completion);  // for ever, [Note: the end of the interpreter]
  completion.reset();  // within the stay
}

template <class Callback>
void complete_somewhere(std::shared_ptr<Completion<Callback>> completion) {
  if (!Communicator::progress_inside_a_wait()) return complete(std::move(completion));
  try {
    std::thread([completion, comm = completion->comm.lock()]() mutable {
      complete(std::move(completion));
    }).detach();
  } catch (const std::system_error&) {
    complete(std::move(completion));  // no thread to be had
  }
}

// Runs callback(error of the first failed part) when all parts are done, in the thread that completes the
// last, or one that it starts.
template <class Callback>
void when_done(const CommPtr& comm, const Parts& parts, Callback callback) {
  auto completion = std::make_shared<Completion<Callback>>(comm, parts, std::move(callback));
  if (parts.empty()) return complete_somewhere(std::move(completion));
  for (const auto& part : parts)
    part->on_completion([completion]() mutable {
      auto mine = std::move(completion);  // the last reference goes where it may
      if (mine->missing.fetch_sub(1, std::memory_order_acq_rel) == 1) complete_somewhere(std::move(mine));
    });
}

void complete_in_a_thread(std::shared_ptr<Communicator> comm, Parts parts) {
  std::thread([comm = std::move(comm), parts = std::move(parts)] {
    for (const auto& part : parts) {
      try {
        part->wait();
      } catch (const std::exception&) {
        // whoever has the future learns of it
      }
    }
  }).detach();
}

c10d::WorkResult result_of(const std::exception_ptr& error) {
  if (!error) return c10d::WorkResult::SUCCESS;
  try {
    std::rethrow_exception(error);
  } catch (const CommError& e) {
    return e.kind == ErrorKind::timeout ? c10d::WorkResult::TIMEOUT : c10d::WorkResult::COMM_ERROR;
  } catch (...) {
    return c10d::WorkResult::UNKNOWN;
  }
}

}  // namespace

std::exception_ptr for_torch(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const CommError& e) {
    return std::make_exception_ptr(TorchCommError(e));
  } catch (...) {
    // anything else is good as it is
  }
  return error;
}

TorchWork::TorchWork(std::shared_ptr<Communicator> comm, c10d::OpType type, uint64_t sequence, Parts parts,
                     std::vector<at::Tensor> outputs, const char* profiling_title,
                     at::TensorList profiled_inputs)
    : c10d::Work(comm->rank(), type, profiling_title,
                 profiling_title ? std::optional(profiled_inputs.vec()) : std::nullopt),
      comm_(std::move(comm)),
      parts_(std::move(parts)),
      outputs_(std::move(outputs)),
      sequence_(sequence) {}

bool TorchWork::isCompleted() {
  bool all = true;
  for (const auto& part : parts_) all &= part->poll();
  return all;
}

bool TorchWork::isSuccess() const {
  for (const auto& part : parts_)
    if (!part->done() || part->error()) return false;
  return true;
}

std::exception_ptr TorchWork::exception() const {
  for (const auto& part : parts_)
    if (part->done() && part->error()) return for_torch(part->error());
  return nullptr;
}

int TorchWork::sourceRank() const {
  auto* message = parts_.size() == 1 ? dynamic_cast<MessageWork*>(parts_[0].get()) : nullptr;
  TORCH_CHECK(
      message,
      "sourceRank() may only be called on work objects that correspond to a recv or recv-from-any call.");
  return message->source();
}

// kNoTimeout (0) and kUnsetTimeout (-1) both mean the time limit of the operation itself: nothing in pycomm
// waits without one.
bool TorchWork::wait(std::chrono::milliseconds timeout) {
  HangIfPythonEnded returns_to_torch;
  const double limit = seconds_of(timeout);
  const auto started = Clock::now();
  for (const auto& part : parts_) {
    const std::chrono::duration<double> passed = Clock::now() - started;
    try {
      part->wait(limit > 0 ? std::max(limit - passed.count(), 1e-3) : 0);
    } catch (const CommError& error) {
      throw TorchCommError(error);
    }
  }
  return true;
}

bool TorchWork::on_device() const {
  return !parts_.empty() && dynamic_cast<cuda::DeviceWork*>(parts_[0].get());
}

// torch's own waits on the device for the future, which is complete at once for works on a device: it would
// order nothing.
void TorchWork::blockCurrentStream() {
  if (on_device()) synchronize();
  else c10d::Work::blockCurrentStream();
}

// Nobody may be waiting but for the future, so the worker is asked to complete the operation.
template <class Complete>
c10::intrusive_ptr<c10::ivalue::Future> TorchWork::make_future(c10::TypePtr type, Complete complete) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(std::move(type));
  when_done(comm_, parts_, [future, complete](const std::exception_ptr& error) { complete(*future, error); });
  if (callbacks_running && !future->completed()) {
    complete_in_a_thread(comm_, parts_);
  } else {
    for (const auto& part : parts_)
      if (!part->poll()) part->help(true);
  }
  return future;
}

c10::TypePtr TorchWork::value_type() const {
  c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
  return lists_ > 1 ? c10::ListType::create(list) : list;
}

// A list of tensors, or a list of such lists.
c10::IValue TorchWork::value() const {
  if (lists_ == 1) return outputs_;
  const size_t length = outputs_.size() / lists_;
  std::vector<std::vector<at::Tensor>> lists;
  for (size_t i = 0; i < lists_; ++i)
    lists.emplace_back(outputs_.begin() + i * length, outputs_.begin() + (i + 1) * length);
  return lists;
}

// As torch's own backends do for devices: complete at once, with the operation's place in stream order
// instead of its end; whoever takes the value has his stream ordered behind it, and callbacks run now, in
// streams of their own.
c10::intrusive_ptr<c10::ivalue::Future> TorchWork::make_device_future() {
  const c10::Device device(
      c10::kCUDA, static_cast<c10::DeviceIndex>(static_cast<cuda::DeviceWork&>(*parts_[0]).device()));
  auto future = c10::make_intrusive<c10::ivalue::Future>(value_type(), std::vector<c10::Device>{device});
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
  for (const auto& part : parts_)
    if (auto* work = dynamic_cast<cuda::DeviceWork*>(part.get()))
      work->order(static_cast<cuda::Stream>(stream.native_handle()));
  c10::StreamGuard guard(stream);
  future->markCompleted(value());
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  std::lock_guard lock(mutex_);
  if (!future_ && on_device()) future_ = make_device_future();
  if (!future_)
    future_ = make_future(value_type(),
                          [value = value()](c10::ivalue::Future& future, const std::exception_ptr& error) {
                            if (error) future.setError(for_torch(error));
                            else future.markCompleted(value);
                          });
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFutureResult() {
  std::lock_guard lock(mutex_);
  if (!future_result_)
    future_result_ =
        make_future(c10::IntType::get(), [](c10::ivalue::Future& future, const std::exception_ptr& error) {
          future.markCompleted(c10::IValue(static_cast<int64_t>(result_of(error))));
        });
  return future_result_;
}

float TorchWork::getDuration() const {
  const float duration = duration_ms_.load();
  TORCH_CHECK(duration >= 0,
              "getDuration: the operation is not complete, or timing is off. Call "
              "_enable_collectives_timing() on the group first.");
  return duration;
}

void TorchWork::observe(const c10::intrusive_ptr<TorchWork>& self, std::shared_ptr<CompletionHook> hook) {
  self->started_ = Clock::now();
  if (hook) {
    std::lock_guard lock(hook->mutex);
    ++hook->pending;
  }
  // [Note: the profiler's event] Whoever has waited may stop the profiler, which frees its events, and an
  // event that ends later writes into that memory. So it ends before the last part is seen done.
  struct Ending {
    c10::intrusive_ptr<TorchWork> work;
    std::atomic<size_t> missing;
    ~Ending() {
      const PythonStay stay;  // [Note: the end of the interpreter]
      if (stay) work.reset();
      else (void)work.release();
    }
    void run() {
      const std::chrono::duration<float> active = Clock::now() - work->started_;
      work->duration_ms_.store(active.count() * 1e3f);
      if (work->recordFunctionEndCallback_ && !python_ended()) work->recordFunctionEndCallback_();
    }
  };
  const auto ending = std::make_shared<Ending>(self, self->parts_.size());
  if (self->parts_.empty()) ending->run();
  for (const auto& part : self->parts_)
    part->before_done([ending] {
      if (ending->missing.fetch_sub(1) == 1) ending->run();
    });
  if (!hook) return;
  when_done(self->comm_, self->parts_, [self, hook](const std::exception_ptr&) {
    const std::chrono::duration<float, std::milli> active(self->duration_ms_.load());
    const auto now = self->started_ + std::chrono::duration_cast<Clock::duration>(active);
    try {
      hook->call(std::make_shared<c10d::WorkInfo>(self->retrieveOpType(), self->sequence_, self->started_,
                                                  now, active));
    } catch (const std::exception& error) {
      abort_for(self->comm_, "the on-completion hook", error);
    }
    std::lock_guard lock(hook->mutex);
    if (--hook->pending == 0) hook->idle.notify_all();
  });
  for (const auto& part : self->parts_)
    part->help(true);  // waitForPendingWorks() does not wait for the works themselves
}

}  // namespace pycomm
